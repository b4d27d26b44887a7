"""The printed description agrees with the program that it describes."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from model.params import named
from tests.train.conftest import CUBE, MOE
from train.core.loss import loss
from train.core.loss.form import LossOptions
from train.core.loss.tiles import sum_tiles
from train.core.step import make_gradients
from train.describe import describe_data, describe_program, print_parameters
from train.units import format_flops


@pytest.fixture(scope="module")
def program(programs):
    return programs(CUBE, devices=8)


def test_the_table_shows_each_parameter_with_its_spec(program, capsys):
    print_parameters(program)
    out = capsys.readouterr().out
    for name, _ in named(program.state.params):
        assert f"\n{name} " in out
    (up_line,) = [
        x for x in out.splitlines() if x.startswith("layers.0.0.mlp.up.weight")
    ]
    assert "layers embed mlp" in up_line
    assert "('pipeline', 'fsdp', 'tensor')" in up_line
    assert up_line.endswith(" 8.00 KiB")  # 2 x 32 x 128 float32 on 4 parts


def test_a_source_that_is_hardly_used_is_not_called_unused(capsys):
    epochs_by_source = {"a": 0.0, "b": 1e-5, "c": 10.004}
    order: Any = SimpleNamespace(
        rows=dict.fromkeys(epochs_by_source, range(9)),
        epochs=lambda num_steps: epochs_by_source,
    )
    describe_data(order, 10)
    descriptions = [
        line.split(", ")[1] for line in capsys.readouterr().out.splitlines()
    ]
    assert descriptions == [
        "never used",
        "used less than 0.01 times",
        "used 10.00 times",
    ]


def test_the_first_screen_says_the_layout_and_the_cost(program, capsys):
    describe_program(program)
    out = capsys.readouterr().out
    leaves = jax.tree.leaves(program.state.params)
    params = sum(leaf.size for leaf in leaves)
    num_sharded = sum(not leaf.sharding.is_fully_replicated for leaf in leaves)
    arrays = f"{params:,} in {len(leaves)} arrays, {num_sharded} of them sharded"
    assert f"parameters  {arrays}" in out
    assert "mesh        data 2 x fsdp 2 x tensor 2" in out
    assert "devices     8 x cpu" in out
    assert "8 rows x 32 = 256 tokens" in out
    assert f" {format_flops(program.flops_per_step)} of the model" in out
    # AdamW has two moments per parameter. 4 devices share all but the norms of heads.
    state = re.search(r"state       ([\d.]+) KiB a device", out)
    assert state is not None
    assert float(state[1]) == pytest.approx(3 * 4 * params / 4 / 1024, rel=0.02)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 384 * 32  # no embedding, no norms
    assert program.flops_per_step == 256 * (6 * matrices + 12 * 2 * 32 * 32)


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        (1, ()),
        (8, CUBE),
        (4, ("mesh.fsdp=2", "mesh.context=2", "train.accumulation_steps=2")),
        (2, ("mesh.tensor=2", "train.accumulation_steps=4")),
        (4, ("mesh.pipeline=2", "mesh.data=2", "train.pipeline_microbatches=4")),
        (4, (*MOE, "mesh.expert=2", "mesh.fsdp=2")),
    ],
)
def test_the_line_of_the_loss_names_the_form_in_the_step(
    programs, monkeypatch, capsys, devices, mesh
):
    """The form of the loss depends on the rows of a microbatch on one device."""
    large = "model.vocab_size=8192", "data.sequence_length=512"
    program = programs([*large, *mesh], devices=devices)
    calls = set()

    def record(options: LossOptions, x_BTD: jax.Array, *args, **kwargs):
        calls.add((options.form, x_BTD.shape[:2]))
        return sum_tiles(options, x_BTD, *args, **kwargs)

    monkeypatch.setattr(loss, "sum_tiles", record)
    step = make_gradients(program.model, program.execution, program.recipe)
    jax.eval_shape(step, program.state.params, program.batch)
    ((form, rows),) = calls
    assert rows == program.execution.placement.microbatch_shape
    describe_program(program)
    assert f"\nloss        logits of {form}\n" in capsys.readouterr().out


def test_the_first_screen_says_that_layers_are_unrolled_by_default(programs, capsys):
    program = programs(["model.layer_unroll=null"])
    for unroll in (1, -1):
        execution = program.execution._replace(layer_unroll=unroll)
        describe_program(replace(program, execution=execution))
        match = re.search(r"^layers +unrolled", capsys.readouterr().out, re.MULTILINE)
        assert bool(match) == (unroll == -1)


def test_a_loss_with_all_logits_at_once_has_no_line(program, capsys):
    describe_program(program)
    assert "\nloss " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "lines"),
    [
        ([], ["step        8 rows x 32 = 256 tokens"]),
        (
            ["data.batch_schedule=[{from_step: 0, rows: 2}, {from_step: 9, rows: 8}]"],
            [
                "step        2 rows x 32 = 64 tokens from batch 0 on",
                "            8 rows x 32 = 256 tokens from batch 9 on",
            ],
        ),
        (
            ["data.batch_schedule=[{from_step: 5, rows: 16}]"],
            [
                "step        8 rows x 32 = 256 tokens from batch 0 on",
                "            16 rows x 32 = 512 tokens from batch 5 on",
            ],
        ),
        (
            ["data.sequence_schedule=[{from_step: 0, length: 16}]"],
            ["step        8 rows x 16 = 128 tokens"],
        ),
    ],
)
def test_the_first_line_of_the_batch_is_that_of_the_first_step(
    programs, capsys, schedule, lines
):
    describe_program(programs(schedule))
    out = capsys.readouterr().out.splitlines()
    first = next(n for n, line in enumerate(out) if line.startswith("step   "))
    assert out[first : first + len(lines)] == lines
    assert " of the model (" in out[first + len(lines)]
