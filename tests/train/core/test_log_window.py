"""A window of steps writes its lines, events and notes."""

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.config import DataConfig
from data.phases import Phase
from train.config import LogConfig
from train.core import log_window
from train.core.log_window import LogWindow

METRICS = {
    **{"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "skipped": 0.0},
    "targets": 80.0,
}

WHOLE_RUN = Phase(first_batch=0, rows=4, length=25)


class Run:
    """Record laps, events and lines, as the directory of a run does."""

    write = True

    def __init__(self):
        self.events = self
        self.earlier_tokens = {}
        self.laps = []
        self.recorded = []
        self.logged = []

    def lap(self, event, parts=None, **fields):
        self.laps.append((event, parts, fields))

    def record(self, event, **fields):
        self.recorded.append(fields)

    def log(self, *line):
        self.logged.append(line)

    def tokens_at(self, step):
        return self.earlier_tokens.get(step, 100 * step)


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def feed():
    return SimpleNamespace(seconds_waited=0.5)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def progress(notes):
    return SimpleNamespace(note=notes.append, update=lambda *figures: None)


def open_window(programs: Any, run: Any, order: Any, feed: Any) -> LogWindow:
    """Open a window of a run that watches every tenth step of 100 tokens."""
    return LogWindow(
        programs,
        LogConfig(numerics_interval_steps=10),
        DataConfig(batch_size=4, sequence_length=25, prefetch=2),
        journal=run,
        batches=order,
        feed=feed,
        peak_flops=None,
    )


@pytest.fixture
def window(run, feed):
    """Open a window of a run that skipped two batches."""
    program = SimpleNamespace(tokens_per_step=100, flops_per_step=1.0)
    order = SimpleNamespace(
        batch_number=lambda step: step + 2, phase=lambda step: WHOLE_RUN
    )
    return open_window({WHOLE_RUN: program}, run, order, feed)


def test_slow_data_is_noted_once_and_not_in_the_first_window(
    window, feed, notes, progress, monkeypatch
):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(log_window.time, "monotonic", lambda: clock.now)
    note_counts = []
    for step, (seconds, waiting_s) in enumerate([(100, 50), (20, 1), (20, 1), (20, 9)]):
        clock.now += seconds
        feed.seconds_waited += waiting_s
        window.add(METRICS)
        window.close(step + 1, progress, write=False)
        note_counts.append(len(notes))
    assert note_counts == [0, 0, 1, 1]
    assert notes[0].startswith("5.0% of the training time is spent waiting for data")
    assert "data.prefetch above 2" in notes[0]


def test_skipped_updates_are_recorded_once_with_their_batches_and_why(
    window, run, notes, progress
):
    spike = METRICS | {"skipped": 1.0, "loss": 9.0, "grad_norm": 2.0}
    for metrics in (spike, METRICS, spike | {"grad_norm": np.inf}):
        window.add(metrics)
    window.read(1003, progress)
    window.read(1003, progress)  # a save reads again, and records nothing twice
    assert notes == [
        "updates skipped: step 1,001 (batch 1,002, spike), "
        "step 1,003 (batch 1,004, not finite)"
    ]
    first = {"step": 1001, "batch": 1002, "loss": 9.0, "grad_norm": 2.0}
    assert run.recorded[0] == {**first, "reason": "spike"}
    assert [event["step"] for event in run.recorded] == [1001, 1003]
    for _ in range(10):
        window.add(spike)
    window.close(1013, progress, write=True)
    assert window.skipped_in_a_row == 11
    assert notes[1].endswith("step 1,011 (batch 1,012, spike) and 2 more")
    window.add(METRICS)
    window.close(1014, progress, write=True)
    assert window.skipped_in_a_row == 0


def test_a_watched_step_names_the_layer_to_blame(window, run, notes, progress):
    """The step after a window with skipped updates is watched, to show the layer."""
    assert [window.should_watch(step) for step in (9, 10)] == [False, True]
    window.skipped_in_a_row = 1
    assert window.should_watch(11)
    names = ("residual", "attention", "mlp", "grad_largest", "grad_norm")
    bad_metrics = {f"numerics/{name}": np.array([1.0, np.inf]) for name in names}
    bad_metrics["numerics/residual"] = np.array([1.0, 2.0])
    window.add({**METRICS, "skipped": 1.0, "loss": math.nan} | bad_metrics)
    assert not window.should_watch(12)
    window.read(11, progress)
    reason = "not finite, layer 1: its attention is not finite"
    assert notes == [f"updates skipped: step 11 (batch 12, {reason})"]
    assert (run.recorded[0]["quantity"], run.recorded[0]["layer"]) == ("attention", 1)
    assert str(window.culprit) == "layer 1: its attention is not finite"
    window.add(METRICS)
    window.read(12, progress)
    assert window.culprit is None


def test_laps_are_split_at_pauses_which_the_speed_leaves_out(
    window, run, feed, progress
):
    for _ in range(3):
        window.add(METRICS)
    feed.seconds_waited = 0.75
    with window.pause("eval"):
        time.sleep(0.5)
    with pytest.raises(OSError, match="full"), window.pause("save"):
        raise OSError("full")
    window.add(METRICS)
    window.close(4, progress, write=True)
    assert run.laps == [
        # The time to fill the buffer before the first window counts too.
        ("step", {"data_wait": 0.75}, {"steps": 3}),
        *[("eval", None, {}), ("save", None, {})],
        ("step", {"data_wait": 0.0}, {"steps": 1, "step": 4}),
    ]
    ((step, values),) = run.logged
    assert step == 4
    assert values["step_seconds"] < 0.1
    assert math.isclose(values["tokens_per_second"] * values["step_seconds"], 80)
    run.laps.clear()
    with window.pause("save"):  # right after a line, a lap without steps is omitted
        pass
    assert run.laps == [("save", None, {})]


def test_tokens_count_targets_and_continue_after_a_restart(window, run, progress):
    """Padding does not count: 80 of the 100 positions of a step are targets."""
    run.earlier_tokens = {5: 350}
    window.add(METRICS)
    window.add(METRICS | {"targets": 60.0})
    window.read(7, progress)  # a save needs them for the start that resumes from it
    assert run.logged == [(7, {"tokens": 490})]
    window.add(METRICS)
    window.close(8, progress, write=True)
    (_, values) = run.logged[-1]
    assert values["tokens"] == 570
    assert values["flops"] == pytest.approx(5.70)
    speed = values["tokens_per_second"] * values["step_seconds"]
    assert speed == pytest.approx(220 / 3)


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ([2.65, 4.04, 3.36], 3.35),
        ([2.0], 2.0),
        ([3.0, (math.nan, 1.0), 5.0], 4.0),
        ([(9.0, 1.0), 1.0], 1.0),
        ([(math.inf, 1.0)], math.nan),
    ],
)
def test_the_mean_loss_of_the_window_leaves_out_skipped_updates(
    window, run, notes, losses, mean
):
    """A pair is the loss of a step and whether its update was skipped."""
    figures_shown = []
    progress: Any = SimpleNamespace(
        note=notes.append, update=lambda *figures: figures_shown.append(figures)
    )
    for loss in losses:
        loss, skipped = loss if isinstance(loss, tuple) else (loss, 0.0)
        window.add(METRICS | {"loss": loss, "skipped": skipped})
    window.close(len(losses), progress, write=True)
    ((_, values),) = run.logged
    assert values["loss_mean"] == pytest.approx(mean, nan_ok=True)
    assert values["positions"] == 100 * len(losses)
    assert values["memory_bytes"] > 2**20
    (_, _, _, _, shown_mean, memory_bytes) = figures_shown[0]
    assert memory_bytes == values["memory_bytes"]
    expected_mean = None if len(losses) == 1 else pytest.approx(mean, nan_ok=True)
    assert shown_mean == expected_mean


def test_every_metric_of_a_step_is_logged(window, run, progress):
    """Figures of layers are excepted: a watched step logs them in another line."""
    loads = np.array([1.5, 2.5])
    added_metrics = {"new": np.float32(3), "expert_load": loads, "numerics/x": loads}
    window.add(METRICS | added_metrics)
    window.close(1, progress, write=True)
    ((_, values),) = (line for line in run.logged if "loss" in line[1])
    assert values["new"] == 3
    expert_loads = {
        key: v for key, v in values.items() if key.startswith("expert_load")
    }
    assert expert_loads == {
        "expert_load": 2.5,
        "expert_load/0": 1.5,
        "expert_load/1": 2.5,
    }
    assert "numerics/x" not in values


def test_flops_count_the_tokens_of_each_phase(run, feed, progress):
    """Two steps have 100 tokens at 3 FLOPs each, and one has 400 tokens at 5."""
    phases = WHOLE_RUN, Phase(first_batch=2, rows=4, length=100, first_token=200)
    programs = {
        phase: SimpleNamespace(
            tokens_per_step=phase.tokens_per_batch,
            flops_per_step=flops * phase.tokens_per_batch,
        )
        for phase, flops in zip(phases, (3.0, 5.0), strict=True)
    }
    order = SimpleNamespace(
        batch_number=lambda step: step, phase=lambda step: phases[step >= 2]
    )
    window = open_window(programs, run, order, feed)
    for step in range(3):
        window.add(METRICS | {"targets": 400.0 if step == 2 else 100.0})
    window.close(3, progress, write=True)
    ((_, values),) = run.logged
    assert values["tokens"] == 600
    assert values["flops"] == pytest.approx(200 * 3 + 400 * 5)
