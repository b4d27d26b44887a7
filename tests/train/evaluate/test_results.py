"""What a finished run has to show, and the line that says how to go on."""

import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

import train.evaluate.results
from train.cli.command import compose
from train.evaluate.results import print_results, results, score_lines
from train.evaluate.validation import Score
from train.identity import run_dir
from train.run.metrics import open_metrics

FOUND = {
    **{"step": 30, "eval/loss": 1.0, "eval/bits_per_byte": 1.0, "sample": "x"},
    **{"validation_bytes": 1, "compressed": {}},
}


@pytest.mark.parametrize(
    "typed",
    [
        ("train.num_steps=30",),
        ("train.num_steps=30", "schedule.final_fraction=0.1"),
        ("run.name=mine", "data.path=a b"),
        ("schedule=constant",),
    ],
)
def test_it_means_the_same_run_and_each_key_once(typed, monkeypatch, capsys):
    monkeypatch.setattr(train.evaluate.results, "read_events", lambda path: [])
    monkeypatch.setattr(train.evaluate.results, "account", lambda events: "")
    config = compose(typed)
    command = shlex.join(["python", "-m", "train", *typed])
    print_results(FOUND, command, config, epath.Path(run_dir(config)))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "to go on" in x]
    overrides = shlex.split(line)[6:]
    keys = [override.partition("=")[0] for override in overrides]
    assert len({*keys}) == len(keys)
    after = compose(overrides)
    assert run_dir(after) == run_dir(config)
    assert after.train.num_steps == 60
    assert after.schedule.final_fraction != 0 or after.schedule.name == "constant"


TEXT = b"".join(b"line %d of a text that compresses well\n" % n for n in range(1000))


def left_by(monkeypatch, num_batches: int, num_targets: int) -> dict[str, Any]:
    """Give the results of a run that scored so much of a text of 10,001 tokens."""
    monkeypatch.setattr(
        train.evaluate.results, "continue_prompts", lambda *args: ["\x1b[2Jx"]
    )
    program: Any = SimpleNamespace(
        config=compose([f"eval.final_num_batches={num_batches}"])
    )
    sources: Any = SimpleNamespace(
        num_tokens=lambda split: 10_001,
        num_bytes=lambda split: len(TEXT),
        text=lambda split, limit: TEXT[:limit],
    )
    return results(program, {}, sources, 30, {"": Score(1.0, 1.5, num_targets)})


def shown(values: dict[str, Any], monkeypatch, capsys) -> str:
    monkeypatch.setattr(train.evaluate.results, "read_events", lambda path: [])
    monkeypatch.setattr(train.evaluate.results, "account", lambda events: "")
    print_results(values, "python -m train", compose([]), epath.Path("runs/x"))
    return capsys.readouterr().out


def test_people_read_the_split_and_then_each_set():
    metrics = {"step": 3, "eval/loss": 1.0, "eval/bits_per_byte": 1.5}
    metrics |= {"eval/web/loss": 2.0, "eval/web/bits_per_byte": 3.0, "tasks/a/loss": 9}
    assert score_lines(metrics) == [
        "validation  1.0000 nats a token, 1.500 bits per byte",
        "  web       2.0000 nats a token, 3.000 bits per byte",
    ]


def test_a_loss_that_is_not_finite_is_said_in_words(monkeypatch, capsys):
    """JSON has no number for it, so that results.json holds null."""
    values = left_by(monkeypatch, -1, 10_000)
    values["eval/loss"] = values["eval/bits_per_byte"] = None
    assert "validation  not finite\n" in shown(values, monkeypatch, capsys)


def test_compressors_get_no_more_text_than_was_scored(monkeypatch, capsys):
    values = left_by(monkeypatch, 2, 499)
    assert values["validation_bytes"] == round(500 / 10_001 * len(TEXT))
    assert values["compressed_bytes"] == values["validation_bytes"]
    out = shown(values, monkeypatch, capsys)
    assert "of its first 499 of 10,001 tokens; the same 1." in out
    everything = left_by(monkeypatch, -1, 10_000)
    assert everything["validation_bytes"] == len(TEXT)
    assert "            the same " in shown(everything, monkeypatch, capsys)


def test_a_part_that_was_compressed_is_called_one(monkeypatch, capsys):
    monkeypatch.setattr(train.evaluate.results, "_COMPRESSED_BYTES", 2048)
    out = shown(left_by(monkeypatch, -1, 10_000), monkeypatch, capsys)
    assert "the first 2.00 KiB of it in bits per byte" in out


def test_the_best_evaluation_is_shown_at_the_end_of_the_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train.evaluate.results, "read_events", lambda path: [])
    monkeypatch.setattr(train.evaluate.results, "account", lambda events: "")
    log = open_metrics(tmp_path, 0)
    for step, loss in ((10, 0.75), (20, 0.5), (30, 1.0)):
        log.append({"step": step, "eval/loss": loss, "eval/bits_per_byte": 2 * loss})
    log.close()
    print_results(FOUND, "python -m train", compose([]), epath.Path(tmp_path))
    out = capsys.readouterr().out
    assert "validation  1.0000 nats a token" in out
    best = "best        0.5000 nats a token, 1.0000 bits per byte at step 20"
    assert best in out


def test_a_sample_does_not_steer_the_terminal(monkeypatch, capsys):
    out = shown(left_by(monkeypatch, -1, 10_000), monkeypatch, capsys)
    assert r"  | \x1b[2Jx" in out


def test_results_of_an_earlier_version_are_shown(monkeypatch, capsys):
    assert "the same 1 B in bits per byte" in shown(FOUND, monkeypatch, capsys)
