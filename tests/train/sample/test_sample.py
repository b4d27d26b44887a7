"""What the command reads and is told; what it draws: test_sampling.py."""

import io
import json
import sys

import pytest

from train.config import RunConfig
from train.errors import ConfigError
from train.sample.__main__ import SampleConfig, chat, read_prompts, validate

RUN = RunConfig(dir="runs/x")


def test_prompts_are_lines_or_records(tmp_path):
    lines, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("one\n\n two\n")
    records.write_text(json.dumps({"prompt": "a\nb"}) + "\n")
    assert read_prompts(str(lines)) == ["one", " two"]
    assert read_prompts(str(records)) == ["a\nb"]


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", "x"])
def test_a_file_without_prompts_is_a_mistake(tmp_path, text):
    file = tmp_path / "a.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="prompts = "):
        read_prompts(str(file))


def test_a_chat_goes_on_from_all_that_was_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nbye\n"))
    seen = []

    def go_on(prompts, seed):
        seen.append((*prompts, seed))
        return [f"<{seed}>"]

    assert [*chat(go_on, "start ", 5)] == ["<5>", "<6>", "<7>"]
    assert seen == [
        ("start hello\n", 5),
        ("start hello\n<5>", 6),
        ("start hello\n<5><6>bye\n", 7),
    ]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (SampleConfig(RUN), []),
        (SampleConfig(RUN, interactive=True, stop=["\n"], prompt="x"), []),
        (SampleConfig(RUN, prompts="f", prompt="x"), ["prompts"]),
        (SampleConfig(RUN, prompts="f", interactive=True), ["prompts"]),
        (SampleConfig(RUN, interactive=True, num_samples=2), ["num_samples"]),
        (SampleConfig(interactive=True, output="x"), ["run.dir", "output"]),
    ],
)
def test_what_does_not_go_together_is_named(config, keys):
    assert [mistake.key for mistake in validate(config)] == keys
