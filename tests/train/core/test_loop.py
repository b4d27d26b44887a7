"""Runs of `python -m train` are stopped in every way, continued and inspected."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from data.batches import Order, validation_batches
from data.catalog import text_store
from data.program import PREFIX
from data.sources import open_sources
from tests.train import command_runs
from tests.train.command_runs import Result, RunCommand, lines, state_of, steps
from train.core.eval_step import make_score_step
from train.core.feed import place
from train.resolve.program import make_program
from train.run.goodput import goodput_of
from train.run.metrics import read_events
from train.run.restore import SavedSteps
from train.run.starts import read_run

# Fixtures.
folder = command_runs.folder
run_command = command_runs.run_command


@pytest.fixture(scope="module")
def straight(folder: Path, run_command: RunCommand) -> Path:
    """Return a run of twenty steps that nothing stopped."""
    result = run_command(folder / "straight")
    assert result.returncode == 0, result.stderr
    assert "from step 0" in result.stdout
    return folder / "straight"


@pytest.fixture
def copy(straight: Path, folder: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy of that run, to be continued."""
    return Path(shutil.copytree(straight, folder / request.node.name))


def saved_steps(run: Path) -> list[int]:
    names = [p.name for p in (run / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


def assert_same(run: Path, straight: Path) -> None:
    """Check that every line and every number of the state is bitwise equal."""
    assert [x["step"] for x in steps(run)] == list(range(1, 21))
    assert steps(run) == steps(straight)
    scores = [[x for x in lines(r) if "eval/loss" in x] for r in (run, straight)]
    assert scores[0] == scores[1]
    assert [x["step"] for x in scores[0]] == [20]
    jax.tree.map(
        np.testing.assert_array_equal, state_of(run, 20), state_of(straight, 20)
    )


def test_a_run_learns_and_writes_the_promised_files(straight):
    losses = [x["loss"] for x in steps(straight)]
    assert losses[-1] < losses[0] - 0.2
    names = {p.name for p in straight.iterdir()}
    assert {"config.yaml", "starts", "checkpoints", "metrics.jsonl"} <= names
    assert {"events.jsonl", "report.html", "results.json"} <= names
    assert saved_steps(straight) == [15, 20]


def test_a_run_stopped_in_every_way_goes_on_as_if_nothing_had_happened(
    folder, run_command, straight
):
    """A preemption notice and a person's interrupt leave a save; kill -9 does not.

    The first start is killed before anything is saved. The events of all starts add up
    to the wall time of an outside clock.
    """
    run = folder / "stopped"
    started_at = time.time()
    killed = run_command(run, at_step=3, signal_number=signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert saved_steps(run) == []
    preempted = run_command(run, at_step=7, signal_number=signal.SIGTERM)
    assert preempted.returncode == 42, preempted.stderr
    assert "from step 0\n" in preempted.stdout
    assert "asked to stop: saved step" in preempted.stderr
    assert saved_steps(run)[-1] == steps(run)[-1]["step"] in range(7, 11)
    interrupted = run_command(run, at_step=12, signal_number=signal.SIGINT)
    assert interrupted.returncode == 130, interrupted.stderr
    stopped_at = saved_steps(run)[-1]
    assert stopped_at == steps(run)[-1]["step"] in range(12, 16)
    assert "Traceback" not in preempted.stderr + interrupted.stderr
    assert not (run / "results.json").exists()
    killed = run_command(run, at_step=18, signal_number=signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert steps(run)[-1]["step"] == 18
    result = run_command(run)
    assert result.returncode == 0, result.stderr
    # The save of step 15 may have been in flight.
    assert re.search(rf"from step ({stopped_at}|15)\n", result.stdout)
    assert_same(run, straight)

    goodput = goodput_of(read_events(run))
    assert [start.code for start in goodput.starts] == [None, 42, 130, None, 0]
    # The tolerance is a percent, and the time to start a process.
    wall_s = goodput.starts[-1].ended - started_at
    assert goodput.wall_s == pytest.approx(wall_s, rel=0.01, abs=1.0)
    assert {"start", "prepare", "restore", "step", "eval", "save"} <= {*goodput.buckets}
    assert "other" not in goodput.buckets
    assert "in 5 starts" in result.stdout


def test_a_finished_run_says_so_and_how_to_go_on(run_command, copy):
    metrics = (copy / "metrics.jsonl").read_bytes()
    result = run_command(copy)
    assert result.returncode == 0
    assert "finished    20 steps" in result.stdout
    (hint,) = [x for x in result.stdout.splitlines() if x.startswith("to go on")]
    assert f"python -m {PREFIX}train " in hint
    assert hint.endswith("train.num_steps=40")
    assert hint.count("train.num_steps") == 1
    # Nothing is laid out, restored or compiled.
    assert "mesh  " not in result.stdout
    assert "from step" not in result.stdout
    assert (copy / "metrics.jsonl").read_bytes() == metrics
    assert saved_steps(copy) == [15, 20]


def test_changes_that_make_another_run_are_refused_key_by_key(run_command, copy):
    result = run_command(copy, ["data.batch_size=16", "model.embed_dim=64", "seed=1"])
    assert result.returncode == 78
    changes = ("data.batch_size", 16, 8), ("model.embed_dim", 64, 32), ("seed", 1, 0)
    for key, new, old in changes:
        assert f"{key} = {new}\n" in result.stderr
        assert f"which has {old};" in result.stderr
        advised = f"run.allow_change=[{key}]" in result.stderr
        assert advised == (key != "model.embed_dim"), "no start can take other shapes"
    assert "Traceback" not in result.stderr
    assert len(list((copy / "starts").iterdir())) == 1


def test_a_refused_rewind_moves_nothing(run_command, copy):
    result = run_command(copy, ["run.rewind_to=17", "data.skip_batches=[3,4]"])
    assert result.returncode == 78
    assert "add run.rewind_to=<a step before them>" in result.stderr
    assert saved_steps(copy) == [15, 20]
    assert not (copy / "checkpoints" / "quarantine").exists()
    assert (copy / "results.json").exists()


@pytest.fixture(scope="module")
def longer(
    folder: Path, straight: Path, run_command: RunCommand
) -> tuple[Path, Result]:
    """Return the run continued to 24 steps, with a protected key allowed to change."""
    run = Path(shutil.copytree(straight, folder / "longer"))
    changes = ("data.name=renamed", "run.allow_change=[data.name]")
    evaluation = (
        *("eval.interval_steps=2", "eval.num_batches=1", "checkpoint.keep_best=true"),
        f"eval.sets={{more: {{path: {folder}/text.txt}}}}",
    )
    result = run_command(run, ["train.num_steps=24", *changes, *evaluation])
    assert result.returncode == 0, result.stderr
    return run, result


def test_a_longer_run_keeps_its_schedule_and_records_what_changed(longer, straight):
    run, result = longer
    assert "from step 20" in result.stdout
    assert "the schedule keeps its length, 20 steps" in result.stderr
    assert steps(run)[:20] == steps(straight)
    assert [x["step"] for x in steps(run)[20:]] == [21, 22, 23, 24]
    config = read_run(str(run))
    final_rate = config.optimizer.learning_rate * config.schedule.final_fraction
    for line in steps(run)[20:]:
        assert line["learning_rate"] == pytest.approx(final_rate)
    assert steps(run)[19]["learning_rate"] > final_rate
    first, second = (run / "config.yaml" for run in (straight, run))
    assert first.read_bytes() == second.read_bytes()
    start = yaml.safe_load((run / "starts" / "2.yaml").read_text())
    assert start["changes"]["train.num_steps"] == 24
    assert start["changes"]["data.name"] == "renamed"


@pytest.mark.slow
def test_another_moment_dtype_is_accepted_if_its_key_is_allowed(run_command, copy):
    """The moments may also change back; evaluation meets them as they were saved."""
    changes = ("optimizer.moment_dtype=int8", "train.num_steps=22")
    result = run_command(copy, changes)
    assert result.returncode == 78
    assert "run.allow_change=[optimizer.moment_dtype]" in result.stderr
    allowed = "run.allow_change=[optimizer.moment_dtype]"
    result = run_command(copy, [*changes, allowed, "eval.interval_steps=21"])
    assert result.returncode == 0, result.stderr
    assert "from step 20" in result.stdout
    assert "moments of step 20 had another format" in result.stderr
    result = run_command(
        copy, ["optimizer.moment_dtype=float32", "train.num_steps=24", allowed]
    )
    assert result.returncode == 0, result.stderr
    assert "moments of step 22 had another format" in result.stderr
    assert [line["step"] for line in steps(copy)] == list(range(1, 25))
    assert all(np.isfinite(line["loss"]) for line in steps(copy))


@pytest.mark.slow
def test_data_may_change_by_its_key_but_a_text_may_not_change_in_place(
    folder, run_command, copy
):
    new_text = folder / "other.txt"
    new_text.write_text((folder / "text.txt").read_text().upper())
    changes = (f"data.path={new_text}", "train.num_steps=24")
    result = run_command(copy, [*changes, "run.allow_change=[data.path]"])
    assert result.returncode == 0, result.stderr
    assert "other data from here on: data.path" in result.stderr
    new_text.write_text("another text again " * 2000)
    refusal = run_command(copy, [*changes, "run.allow_change=[data.path]"])
    assert refusal.returncode == 65
    assert "fingerprint" in refusal.stderr
    assert "bring that data back" in refusal.stderr
    assert "Traceback" not in refusal.stderr
    assert [line["step"] for line in steps(copy)][-1] == 24
    assert read_run(str(copy)).data.path == str(new_text)
    assert read_run(str(copy), 19).data.path == str(folder / "text.txt")


def test_training_validation_and_tasks_agree_that_padding_ids_have_no_probability(
    straight,
):
    """The model's vocabulary is 384 for the 257 ids of bytes."""
    config = read_run(str(straight))
    sources = open_sources(config.data, text_store)
    program = make_program(config, jax.devices()[:2])
    score_step = jax.jit(
        make_score_step(program.model, program.execution, program.recipe, 257)
    )

    def mean(step: int, batches) -> float:
        params = state_of(straight, step).params
        params = jax.device_put(params, program.shardings.params)
        sums = [score_step(params, place(b, program.batch))[0] for b in batches]
        count = sum((batch.targets >= 0).sum() for batch in batches)
        return float(np.sum(np.float64(sums)) / count)

    batch = Order(sources, config.data, config.seed).read(15)
    losses = {x["step"]: x["loss"] for x in steps(straight)}
    assert mean(15, [batch]) == pytest.approx(losses[16], rel=1e-5)
    validation = [*validation_batches(sources, config.data, -1)]
    (score,) = [x["eval/loss"] for x in lines(straight) if "eval/loss" in x]
    assert mean(20, validation) == pytest.approx(score, rel=1e-5)


def test_named_sets_are_scored_and_the_best_step_is_kept(longer, run_command):
    run, result = longer
    results = json.loads((run / "results.json").read_text())
    scores = [x for x in lines(run) if "eval/more/loss" in x]
    assert [x["step"] for x in scores] == [22, 24]
    progress = [x.split()[:2] for x in result.stderr.splitlines() if "validation" in x]
    assert progress == [["step", "22"], ["step", "24"]]  # Each has one line.
    assert scores[-1]["eval/more/loss"] == results["eval/more/loss"]
    assert f"  more      {results['eval/more/loss']:.4f} nats" in result.stdout
    best = SavedSteps(run / "checkpoints").scores()
    assert {22, 24} >= {*best} >= {min(best, key=lambda step: best[step])}
    arguments = ("runtime.cpu_devices=2", "step=best", "num_batches=1")
    evaluation = run_command(run, arguments, module="train.evaluate", config=())
    assert evaluation.returncode == 0, evaluation.stderr
    score = json.loads(evaluation.stdout.splitlines()[-1])
    assert score["loss"] == pytest.approx(min(best.values()), rel=1e-6)
    assert {*score["sets"]} == {"more"}


def test_sample_continues_the_prompt(run_command, straight):
    result = run_command(
        straight,
        [
            "prompt=def wrap",
            "num_tokens=10",
            "temperature=0",
            "num_samples=2",
            "step=15",
            "runtime.cpu_devices=2",
        ],
        module="train.sample",
        config=(),
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.removesuffix("\n").split(f"\n{'-' * 72}\n")
    assert first == second
    assert first.startswith("def wrap")
    assert len(first) > len("def wrap")
