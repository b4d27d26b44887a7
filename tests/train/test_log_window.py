"""What is said of a window of steps."""

import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from train.log_window import DataWait, LogWindow
from train.step import Metrics


def notes_on_waiting(windows: list[tuple[float, float]]) -> list[str]:
    """Return the warnings after windows of (seconds, of these waiting for data)."""
    wait = DataWait(prefetch=2)
    warnings = [wait.warning(*window) for window in windows]
    return [warning for warning in warnings if warning]


def test_slow_data_is_noted_once_and_only_if_it_lasts():
    (note,) = notes_on_waiting([(100, 50), (20, 1), (20, 1), (20, 9)])
    assert note.startswith("5.0% of the training time is spent waiting for data")
    assert "data.prefetch above 2" in note
    assert notes_on_waiting([(100, 50), (2, 1)]) == []  # a short run's second window
    assert notes_on_waiting([(1, 0), (20, 1), (200, 0)]) == []


def test_what_is_read_before_a_save_is_not_recorded_again(window):
    events = []

    def record(event: str, **fields: object) -> None:
        events.append(fields["step"])

    window._run.events.record = record
    progress = SimpleNamespace(note=lambda text: None)
    keys = "skipped", "loss", "grad_norm", "targets"
    left_out = dict.fromkeys(keys, np.float32(1))
    for step in range(11, 16):
        window.add(left_out)
        if step in (12, 15):
            window.read(step, progress)
    assert events == [11, 12, 13, 14, 15]
    assert window.skipped_in_a_row == 5
    window.read(15, progress)
    assert events == [11, 12, 13, 14, 15]


def test_skipped_updates_are_recorded_with_their_batches_and_why(window):
    """data.skip_batches left out two batches before these; eleven steps in a row."""
    events, notes = [], []

    def record(event: str, **fields: object) -> None:
        events.append((event, fields))

    window._run.events.record = record
    window._order.batch_number = lambda step: step + 2
    window.skipped_in_a_row = 1
    progress = SimpleNamespace(note=notes.append)

    def step(skipped: float, loss: float = 9.0, norm: float = 2.0) -> Metrics:
        values = {"skipped": skipped, "loss": loss, "grad_norm": norm}
        return {key: np.float32(value) for key, value in values.items()}

    window.record(1000, [step(1), step(0), step(1, norm=np.inf)], progress)
    assert notes == [
        "updates skipped: step 1,001 (batch 1,002, spike), "
        "step 1,003 (batch 1,004, not finite)"
    ]
    first = {"step": 1001, "batch": 1002, "loss": 9.0, "grad_norm": 2.0}
    assert events[0] == ("skipped", {**first, "reason": "spike"})
    assert events[1][1]["reason"] == "not finite"
    assert window.skipped_in_a_row == 1
    window.record(1003, [step(1)] * 10, progress)
    assert window.skipped_in_a_row == 11
    assert len(events) == 12
    assert notes[1].endswith("step 1,011 (batch 1,012, spike) and 2 more")
    window.record(1013, [step(0)], progress)
    assert window.skipped_in_a_row == 0
    assert len(notes) == 2


def test_a_watched_step_names_the_layer_to_blame(window):
    """The step after a window that left out updates is watched, so that it shows."""
    window._program.config.log = SimpleNamespace(numerics_interval_steps=10)
    assert [window.is_to_watch(step) for step in (9, 10)] == [False, True]
    window.skipped_in_a_row = 1
    assert window.is_to_watch(11)
    window.add({})
    assert not window.is_to_watch(12)
    window._program.config.log = SimpleNamespace(numerics_interval_steps=None)
    assert not window.is_to_watch(10)

    events, notes = [], []
    window._run.events.record = lambda *args, **fields: events.append(fields)
    names = ("residual", "attention", "mlp", "grad_largest", "grad_norm")
    bad = {f"numerics/{name}": np.array([1.0, np.inf]) for name in names}
    bad["numerics/residual"] = np.array([1.0, 2.0])
    skipped = {**METRICS, "skipped": 1.0, "loss": math.nan}
    window.record(10, [skipped | bad], SimpleNamespace(note=notes.append))
    said = "not finite, layer 1: its attention is not finite"
    assert notes == [f"updates skipped: step 11 (batch 10, {said})"]
    assert (events[0]["quantity"], events[0]["layer"]) == ("attention", 1)
    assert str(window.culprit) == "layer 1: its attention is not finite"
    ((step, values),) = window._run.logged
    assert (step, len(values)) == (11, 10)
    window.record(11, [METRICS], PROGRESS)
    assert window.culprit is None


class Events:
    """Notes laps as an EventLog would."""

    def __init__(self) -> None:
        self.laps = []

    def lap(self, event, parts=None, **fields):
        self.laps.append((event, parts, fields))


@pytest.fixture
def window(tmp_path):
    config = SimpleNamespace(data=SimpleNamespace(prefetch=2))
    device = SimpleNamespace(device_kind="cpu")
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[device]), size=1)
    program = SimpleNamespace(
        config=config, mesh=mesh, tokens_per_step=100, flops_per_step=1.0
    )
    logged = []
    run = SimpleNamespace(
        events=Events(),
        log=lambda *args: logged.append(args),
        logged=logged,
        path=tmp_path,
        write=True,
    )
    order = SimpleNamespace(batch_number=lambda step: step)
    return LogWindow(program, run, order, SimpleNamespace(seconds_waited=0.5))


METRICS = {
    **{"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "skipped": 0.0},
    "targets": 80.0,
}
PROGRESS = SimpleNamespace(note=lambda text: None, update=lambda *args: None)


def test_laps_are_split_at_pauses_and_speed_is_free_of_them(window):
    feed, events = window._feed, window._run.events
    for _ in range(3):
        window.add(METRICS)
    feed.seconds_waited = 0.75
    with window.pause("eval"):
        time.sleep(0.5)
    with pytest.raises(OSError, match="full"), window.pause("save"):
        raise OSError("full")
    window.add(METRICS)
    window.close(4, PROGRESS, write=True)
    assert events.laps == [
        # What the buffer took to fill before the first window counts too.
        ("step", {"data_wait": 0.75}, {"steps": 3}),
        *[("eval", None, {}), ("save", None, {})],
        ("step", {"data_wait": 0.0}, {"steps": 1, "step": 4}),
    ]
    ((step, values),) = window._run.logged
    assert step == 4
    assert values["step_seconds"] < 0.1
    assert math.isclose(values["tokens_per_second"] * values["step_seconds"], 80)
    events.laps.clear()
    with window.pause("save"):  # right after a line: no lap of no steps
        pass
    assert events.laps == [("save", None, {})]


def test_steps_that_still_run_as_a_pause_begins_are_no_part_of_it(window):
    class Running:
        """A metric of a step that takes a quarter of a second more."""

        def block_until_ready(self):
            time.sleep(0.25)

    window.add({"loss": Running()})
    with window.pause("profile"):
        pass
    assert window._paused < 0.2
    assert time.monotonic() - window._began - window._paused >= 0.25


def test_tokens_are_targets_and_go_on_where_a_start_ended(window):
    """Without padding: of the 100 positions of a step 80 are targets."""
    run, rows = window._run, [{"step": 5, "tokens": 350}, {"step": 5, "eval/loss": 1}]
    (run.path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    window.add(METRICS)
    window.add(METRICS | {"targets": 60.0})
    window.read(7, PROGRESS)  # before a save: a start that goes on from it needs them
    assert run.logged == [(7, {"tokens": 490})]
    window.add(METRICS)
    window.close(8, PROGRESS, write=True)
    (_, values) = run.logged[-1]
    assert values["tokens"] == 570
    assert values["flops"] == pytest.approx(5.70)
    speed = values["tokens_per_second"] * values["step_seconds"]
    assert speed == pytest.approx(220 / 3)


def test_every_metric_of_a_step_is_logged_whatever_it_is(window):
    """But for figures of layers, which a watched step has a line for."""
    loads = np.array([1.5, 2.5])
    more = {"new": np.float32(3), "expert_load": loads, "numerics/x": loads}
    window.add(METRICS | more)
    window.close(1, PROGRESS, write=True)
    ((_, values),) = (each for each in window._run.logged if "loss" in each[1])
    assert values["new"] == 3
    found = {key: v for key, v in values.items() if key.startswith("expert_load")}
    assert found == {"expert_load": 2.5, "expert_load/0": 1.5, "expert_load/1": 2.5}
    assert "numerics/x" not in values
