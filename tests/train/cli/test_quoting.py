import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from train.cli.quoting import quote_text
from train.config import Config
from train.sample.__main__ import SampleConfig


def read(argument):
    value = OverridesParser.create().parse_override(argument).value()
    return value if value is None else str(value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "def main(",
            'say "hi"',
            "a\\",
            'a\\"b',
            'end\\\\"',
            "x, y",
            "[1",
            "{",
            "[1, 2]",
        ),
        *("it's", "a=b", "\\n", '{"a": 1}', "line\nbreak", "ü é", "  lead ", "42"),
    ],
)
def test_text_arrives_as_it_was_typed(text):
    [argument] = quote_text([f"prompt={text}"], SampleConfig)
    assert read(argument) == text


def test_null_and_what_is_quoted_already_stay():
    typed = ["prompt=null", 'prompt="a, b"', "run.dir='x'"]
    assert quote_text(typed, SampleConfig) == typed


def test_sweeps_and_other_keys_stay():
    typed = ["--multirun", "data.path=a,b", "model.num_layers=[1"]
    assert quote_text(typed, Config) == typed
    assert quote_text(typed[1:], Config)[0] == 'data.path="a,b"'
