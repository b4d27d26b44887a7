import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from data.prepare_config import PrepareConfig
from data.train_tokenizer import TrainTokenizerConfig
from train.cli.quoting import quote_text
from train.config import Config
from train.sample.__main__ import SampleConfig


def read(argument):
    value = OverridesParser.create().parse_override(argument).value()
    return value if value is None else str(value)


@pytest.mark.parametrize(
    "text",
    [
        *("def main(", 'say "hi"', "a\\", 'a\\"b', 'end\\\\"', "x, y", "[1", "{"),
        *("it's", "a=b", "\\n", '{"a": 1}', "line\nbreak", "ü é", "  lead ", "42"),
        # These would change as numbers: a date, a version, a commit, a score.
        *("20240101_1200", "1.10", "1e52341", "3.140", "0x10", "nan", "true"),
    ],
)
def test_text_arrives_as_it_was_typed(text):
    [argument] = quote_text([f"prompt={text}"], SampleConfig)
    assert read(argument) == text


@pytest.mark.parametrize("schema", [PrepareConfig, TrainTokenizerConfig])
@pytest.mark.parametrize("path", ["a(b) c.txt", "a,b", "1.10", "x=y", "{a}", "a\\"])
def test_a_path_or_a_list_of_paths_arrives_as_it_was_typed(path, schema):
    [argument] = quote_text([f"input={path}"], schema)
    assert read(argument) == path
    assert quote_text(["input=[a,b]"], schema) == ["input=[a,b]"]


def test_null_and_quoted_values_stay_unchanged():
    overrides = ["prompt=null", 'prompt="a, b"', "run.dir='x'"]
    assert quote_text(overrides, SampleConfig) == overrides


def test_numbers_among_the_values_of_a_sweep_arrive_as_they_were_typed():
    def values(argument):
        _, argument = quote_text(["--multirun", argument], Config)
        sweep = OverridesParser.create().parse_override(argument)
        overrides = [f"run.name={value}" for value in sweep.sweep_string_iterator()]
        # Each job quotes its override again.
        return [read(text) for text in quote_text(overrides, Config)]

    assert values("run.name=1.10, 1e52341,base") == ["1.10", "1e52341", "base"]
    assert values("run.name=choice(1.10,true)") == ["1.10", "true"]
    for override in (r"run.name=a\,1.10,2", """run.name='b,1.10',"it's",2"""):
        assert values(override)[-1] == "2"
    assert values("""run.name='b,1.10',"2.0",null""") == ["b,1.10", "2.0", None]
    assert values("run.name=range(1,3)") == ["1", "2"]


def test_sweeps_and_other_keys_stay_unchanged():
    overrides = ["--multirun", "data.path=a,b", "model.num_layers=[1"]
    assert quote_text(overrides, Config) == overrides
    assert quote_text(overrides[1:], Config)[0] == 'data.path="a,b"'
