"""What the command reads and is told; what it draws: test_generate.py."""

import io
import json
import sys

import pytest

from train.cli.command import check_command_line
from train.config import RunConfig
from train.errors import ConfigError
from train.sample.__main__ import (
    SampleConfig,
    chat,
    continue_all,
    main,
    output_file,
    read_prompts,
    sample_mistakes,
)

RUN = RunConfig(dir="runs/x")


def test_prompts_are_lines_or_records(tmp_path):
    lines = tmp_path / "a.txt"
    records = tmp_path / "a.jsonl"
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
        (SampleConfig(RUN, stop=["\n", ""]), ["stop"]),
    ],
)
def test_what_does_not_go_together_is_named(config, keys):
    assert [mistake.key for mistake in sample_mistakes(config)] == keys


def test_prompts_are_continued_in_batches_of_one_size():
    asked = []

    def go_on(prompts, seed):
        asked.append((len(prompts), seed))
        return [f"{prompt}!" for prompt in prompts]

    rows = ["ccc", "a", "bb", "a", "dddd"]
    assert continue_all(go_on, rows, 2, 7) == [f"{row}!" for row in rows]
    assert asked == [(2, 7), (2, 9), (2, 11)]
    asked.clear()
    continue_all(go_on, rows[:2], 64, 0)
    assert asked == [(2, 0)]


def test_an_output_that_cannot_be_written_is_said_before_anything(tmp_path):
    (tmp_path / "file").write_text("kept")
    for output in (f"{tmp_path}/file/x.jsonl", "http://host/x.jsonl"):
        with pytest.raises(ConfigError, match="output = "):
            main(SampleConfig(RUN, output=output))
    for name in ("file", "new/x.jsonl"):
        with pytest.raises(ConfigError, match="runs/x"):
            main(SampleConfig(RUN, output=f"{tmp_path}/{name}"))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.slow
def test_an_output_in_a_store_is_there_from_the_beginning(server):
    file = output_file("s3://bucket/texts.jsonl")
    assert file.read_text() == ""
    file.write_text("{}\n")
    assert output_file("s3://bucket/texts.jsonl").read_text() == "{}\n"


def test_a_line_end_can_be_typed_as_a_stop():
    typed = ["run.dir=runs/x", r'stop=["\n\n","#\t"]']
    config = check_command_line(typed, "sample", SampleConfig, sample_mistakes)
    assert config.stop_texts == ["\n\n", "#\t"]
