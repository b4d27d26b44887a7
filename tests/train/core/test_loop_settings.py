"""Runs of `python -m train` with unusual settings succeed, or stop with a reason."""

import jax
import numpy as np
import pytest
import yaml

from data.batches import Order
from data.catalog import FORMATS, text_store
from data.config import DataConfig, MixtureSource, Source
from data.prepare_config import PrepareConfig
from data.sources import open_sources
from data.token_store.build import prepare_store
from tests.train import command_runs
from tests.train.command_runs import lines, state_of, steps
from train.run.metrics import read_events

# Fixtures.
folder = command_runs.folder
run_command = command_runs.run_command


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.moment_dtype=int8", "model.param_dtype=bfloat16"),
        ("optimizer=lion", "optimizer.moment_dtype=bfloat16", "optimizer.ema_decay=.9"),
        ("optimizer=adafactor", "model.param_dtype=bfloat16"),
        ("model.compute_dtype=int8", "model.high_precision_layers=[first]"),
        ("model.compute_dtype=float8", "optimizer.offload=true"),
    ],
    ids=" ".join,
)
def test_a_run_with_random_rounding_resumes_bitwise_equal(
    folder, run_command, overrides
):
    run = folder / overrides[0]
    result = run_command(run, overrides)
    assert result.returncode == 0, result.stderr
    losses = steps(run)
    state = state_of(run, 20)
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.02
    result = run_command(run, [*overrides, "run.rewind_to=15"])
    assert result.returncode == 0, result.stderr
    assert "from step 15" in result.stdout
    jax.tree.map(np.testing.assert_array_equal, state_of(run, 20), state)


@pytest.mark.slow
def test_a_planned_mesh_is_written_out(folder, run_command):
    path = folder / "chosen"
    steps = "train.num_steps=2"
    result = run_command(path, ["mesh=planned", steps])
    assert result.returncode == 0, result.stderr
    assert "mesh=planned: the rates of these devices are unknown" in result.stderr
    mesh = yaml.safe_load((path / "config.yaml").read_text())["mesh"]
    assert (mesh["fsdp"], mesh["planned"]) == (2, False)
    second_result = run_command(path, ["mesh=planned", steps])  # the same command
    assert second_result.returncode == 0, second_result.stderr


@pytest.mark.slow
def test_a_source_may_be_used_up_by_the_last_step(folder, run_command):
    """The loop would read more rows ahead of its steps than the source has."""
    store = folder / "prepared"
    prepare_store(PrepareConfig(input=f"{folder}/text.txt", output=str(store)), FORMATS)
    options = {"name": "mixture", "source": Source.mixture, "sequence_length": 32}
    data = DataConfig(**options, sources={"a": MixtureSource(str(store))}, batch_size=8)
    (rows,) = Order(open_sources(data, text_store), data, 0).rows.values()
    config = (
        *("model.num_layers=1", "model.embed_dim=32", "model.num_heads=2"),
        *("data=mixture", "data.sequence_length=32", "data.batch_size=8"),
        # Ten batches take 80 of 84 rows: half a batch remains after the last step.
        f"data.sources={{a: {{path: {store}, epochs: {84 / len(rows)}}}}}",
        *("train.num_steps=10", "runtime.cpu_devices=2", "tracker=none"),
    )
    result = run_command(folder / "used_up", config=config)
    assert result.returncode == 0, result.stderr
    result = run_command(folder / "used_up", ["train.num_steps=11"], config=config)
    assert result.returncode == 78
    assert "data.sources.a.epochs" in result.stderr


@pytest.mark.slow
def test_values_that_are_not_finite_are_not_saved_and_end_the_run(folder, run_command):
    """A moment overflows after step 7, and no step notices it."""
    fault = "fill:7:optimizer.transform.0.mu.layers.0.0.mlp.up.weight:1:inf"
    run = folder / "poisoned"
    result = run_command(run, ["train.max_skipped_steps=100"], fault=fault)
    assert result.returncode == 3, result.stderr
    assert "step 10 is not saved: there are values that are not" in result.stderr
    assert {p.name for p in (run / "checkpoints").glob("[0-9]*")} == {"5"}


def test_a_run_that_diverges_stops_with_advice(folder, run_command):
    result = run_command(
        folder / "diverged",
        [
            "optimizer.learning_rate=1e30",
            "train.max_skipped_steps=2",
            "data.skip_batches=[2,4]",
        ],
    )
    assert result.returncode == 3, result.stderr
    assert "the last 3 updates were skipped" in result.stderr
    assert "Lower the learning rate" in result.stderr
    assert "Traceback" not in result.stderr
    rows = lines(folder / "diverged")
    assert all(x["grad_norm"] > 0 for x in rows)  # Its square overflows in a weight.
    skip_events = [
        e for e in read_events(folder / "diverged") if e["event"] == "skipped"
    ]
    assert [e["step"] for e in skip_events[-3:]] == [x["step"] for x in rows[-3:]]
    for event in skip_events:
        assert event["batch"] == event["step"] - 1 + 3 * (event["step"] > 2)
        assert event["reason"] == "the update overflows"
