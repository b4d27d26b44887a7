"""A finished run prints its results, and a command that continues it."""

import shlex
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from etils import epath

from data.tokenizer import load_tokenizer
from tests.program import module_option
from train.cli.command import compose
from train.evaluate import results
from train.evaluate.results import (
    compression_bits_per_byte,
    compute_results,
    print_results,
    score_lines,
)
from train.evaluate.validation import Score
from train.identity import run_dir
from train.run.metrics import open_metrics
from train.run.validations import FINAL, PART, WHOLE
from train.units import format_bytes

FOUND = {
    **{"step": 30, "eval/loss": 1.0, "eval/bits_per_byte": 1.0, "sample": "x"},
    **{"scored_tokens": 9, "validation_tokens": 9, "validation_bytes": 1},
    **{"compressed_bytes": 1, "compressed": {}, "sample_prompt": ""},
}


@pytest.fixture
def shown(monkeypatch, capsys):
    """Return a function that prints results and returns the output."""
    monkeypatch.setattr(results, "read_events", lambda path: [])
    monkeypatch.setattr(results, "goodput_of", lambda events: "")

    def shown(values, command="python -m train", config=None, path="runs/x") -> str:
        config = config or compose([])
        print_results(values, command, epath.Path(path), config.schedule, config.run)
        return capsys.readouterr().out

    return shown


@pytest.mark.parametrize(
    "typed",
    [
        ("train.num_steps=30",),
        ("train.num_steps=30", "schedule.final_fraction=0.1"),
        ("run.name=mine", "data.path=a b"),
        ("schedule=constant",),
    ],
)
def test_the_command_continues_the_same_run_and_has_each_key_once(typed, shown):
    config = compose(typed)
    command = shlex.join(["python", *module_option("train"), *typed])
    out = shown(FOUND, command, config, run_dir(config))
    (line,) = [x for x in out.splitlines() if "to go on" in x]
    overrides = shlex.split(line)[6:]
    keys = [override.partition("=")[0] for override in overrides]
    assert len({*keys}) == len(keys)
    next_config = compose(overrides)
    assert run_dir(next_config) == run_dir(config)
    assert next_config.train.num_steps == 60
    assert (
        next_config.schedule.final_fraction != 0
        or next_config.schedule.name == "constant"
    )


TEXT = b"".join(b"line %d of a text that compresses well\n" % n for n in range(1000))


def results_after(monkeypatch, num_batches: int, num_targets: int) -> dict[str, Any]:
    """Return the results after scoring all or a part of a text of 10,001 tokens."""
    monkeypatch.setattr(results, "continue_rows", lambda *args, **named: ["\x1b[2Jx"])
    config = compose([f"eval.final_num_batches={num_batches}"])
    program: Any = SimpleNamespace(config=config)
    encoding = load_tokenizer("bytes")
    sources: Any = SimpleNamespace(
        encoding=encoding,
        has_many_documents=True,
        num_tokens=lambda split: 10_001,
        num_bytes=lambda split: len(TEXT),
        text=lambda split, limit: TEXT[:limit],
    )
    is_whole = num_batches < 0
    evaluations = {
        PART: {"": Score(1.25, 2.0, 400)},
        WHOLE if is_whole else FINAL: {"": Score(1.0, 1.5, num_targets, is_whole)},
    }
    return compute_results(program, {}, sources, 30, evaluations)


def test_people_read_the_split_and_then_each_set():
    metrics = {"step": 3, "eval/loss": 1.0, "eval/bits_per_byte": 1.5}
    metrics |= {"eval/web/loss": 2.0, "eval/web/bits_per_byte": 3.0, "tasks/a/loss": 9}
    assert score_lines(metrics) == [
        "validation  1.0000 nats a token, 1.500 bits per byte",
        "  web       2.0000 nats a token, 3.000 bits per byte",
    ]


def test_rows_that_are_the_whole_set_have_one_line():
    metrics = {"eval/loss": 1.0, "eval/targets": 30, "eval_whole/loss": 1.0}
    assert score_lines({**metrics, "eval_whole/targets": 30}) == [
        "whole set   1.0000 nats a token"
    ]
    assert len(score_lines({**metrics, "eval_whole/targets": 31})) == 2


def test_results_for_people(monkeypatch, shown):
    values = results_after(monkeypatch, -1, 10_000)
    assert values["validation_bytes"] == len(TEXT)
    out = shown(values)
    assert "            the same " in out
    assert r"  | \x1b[2Jx" in out  # a sample does not steer the terminal
    # JSON has no number for a loss that is not finite, so results.json holds null.
    values["eval_whole/loss"] = values["eval_whole/bits_per_byte"] = None
    assert "whole set   not finite\n" in shown(values)
    assert "the same 1 B in bits per byte" in shown(FOUND)


def test_compressors_get_no_more_text_than_was_scored(monkeypatch, shown):
    values = results_after(monkeypatch, 2, 499)
    assert values["validation_bytes"] == round(500 / 10_001 * len(TEXT))
    assert values["compressed_bytes"] == values["validation_bytes"]
    text = format_bytes(values["compressed_bytes"])
    line = "final       1.0000 nats a token, 1.500 bits per byte\n            "
    line += f"of 499 of 10,001 tokens, evenly spread; the first {text} in bits per byte"
    assert line in shown(values)
    monkeypatch.setattr(results, "_COMPRESSED_BYTES", 2048)
    out = shown(results_after(monkeypatch, -1, 10_000))
    assert "the first 2.00 KiB of it in bits per byte" in out


def test_the_best_evaluation_is_shown_at_the_end_of_the_run(tmp_path, shown):
    log = open_metrics(tmp_path, 0)
    for step, loss in ((10, 0.75), (20, 0.5), (30, 1.0)):
        log.append({"step": step, "eval/loss": loss, "eval/bits_per_byte": 2 * loss})
    log.close()
    out = shown(FOUND, path=tmp_path)
    assert "validation  1.0000 nats a token" in out
    assert "best        0.5000 nats a token, 1.0000 bits per byte at step 20" in out


def test_compression_is_in_bits_per_byte():
    for text, low in ((np.random.default_rng(0).bytes(50_000), 8), (b"ab" * 25_000, 0)):
        bits = compression_bits_per_byte(text)
        assert all(low < bits[name] < low + 0.1 for name in ("gzip", "xz"))
