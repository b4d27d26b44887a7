"""The command reads prompts and options; test_generate.py tests what it draws."""

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


def test_a_chat_continues_the_whole_conversation(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nbye\n"))
    calls = []

    def continue_texts(prompts, seed):
        calls.append((*prompts, seed))
        return [f"<{seed}>"]

    assert [*chat(continue_texts, "start ", 5)] == ["<5>", "<6>", "<7>"]
    assert calls == [
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
def test_keys_that_exclude_each_other_are_named(config, keys):
    assert [mistake.key for mistake in sample_mistakes(config)] == keys


def test_prompts_are_continued_in_batches_of_one_size():
    calls = []

    def continue_texts(prompts, seed):
        calls.append((len(prompts), seed))
        return [f"{prompt}!" for prompt in prompts]

    rows = ["ccc", "a", "bb", "a", "dddd"]
    assert continue_all(continue_texts, rows, 2, 7) == [f"{row}!" for row in rows]
    assert calls == [(2, 7), (2, 9), (2, 11)]
    calls.clear()
    continue_all(continue_texts, rows[:2], 64, 0)
    assert calls == [(2, 0)]


def test_an_output_that_cannot_be_written_is_reported_first(tmp_path):
    (tmp_path / "file").write_text("kept")
    for output in (f"{tmp_path}/file/x.jsonl", "http://host/x.jsonl"):
        with pytest.raises(ConfigError, match="output = "):
            main(SampleConfig(RUN, output=output))
    for name in ("file", "new/x.jsonl"):
        with pytest.raises(ConfigError, match="runs/x"):
            main(SampleConfig(RUN, output=f"{tmp_path}/{name}"))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.slow
def test_an_output_in_a_store_exists_from_the_beginning(server):
    file = output_file("s3://bucket/texts.jsonl")
    assert file.read_text() == ""
    file.write_text("{}\n")
    assert output_file("s3://bucket/texts.jsonl").read_text() == "{}\n"


def test_a_line_end_can_be_typed_as_a_stop():
    command_line = ["run.dir=runs/x", r'stop=["\n\n","#\t"]']
    config = check_command_line(command_line, "sample", SampleConfig, sample_mistakes)
    assert config.stop_texts == ["\n\n", "#\t"]
