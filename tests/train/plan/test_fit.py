"""What a step that does not fit is advised does fit."""

import dataclasses

import jax
import pytest

from train.plan.advice import print_remedy
from train.plan.budget import MemoryBudget
from train.plan.estimated.step import estimate_memory
from train.plan.fit import make_fit
from train.plan.memory import Figure
from train.plan.recomputing import format_policy, policies_keeping_less
from train.sharding import bytes_per_device
from train.units import format_bytes

MIB = 2**20
GPT2 = (
    *("model=gpt2_124m", "model.vocab_size=50304", "optimizer=adamw"),
    "data.sequence_length=1024",
)


@pytest.fixture
def laid_out(composed, lay_out, monkeypatch):
    """Lay a model out on eight chips that are not there, of a new libtpu."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    return lambda *overrides: lay_out(composed(*GPT2, *overrides), "v5e-8")


def needs(program) -> int:
    return estimate_memory(program).needed.bytes


SHARD, REMAT = "mesh.data=1 mesh.fsdp=8", "train.remat=full"


@pytest.mark.parametrize(
    ("overrides", "mib", "override"),
    [
        (("mesh=ddp", "data.batch_size=64"), 4000, "train.remat=dots"),
        (("mesh=ddp", "data.batch_size=8"), 2000, SHARD),
        (
            ("mesh=ddp", "data.batch_size=64"),
            1500,
            f"{SHARD} train.remat=[attention]",
        ),
        (
            ("mesh=ddp", "data.batch_size=512"),
            1300,
            f"{SHARD} {REMAT} train.accumulation_steps=8",
        ),
        (
            ("mesh=fsdp", "data.batch_size=512", REMAT),
            3000,
            "train.accumulation_steps=2",
        ),
        (("mesh=fsdp", "data.batch_size=8", REMAT), 100, "search=true"),
        pytest.param(
            *(("mesh=ddp", "data.batch_size=64"), 100, "search=true"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_advised_fits(laid_out, overrides, mib, override):
    program, room = laid_out(*overrides), MemoryBudget(*[mib * MIB] * 3)
    memory = estimate_memory(program)
    assert memory.fits(room) is False
    advice = make_fit(program, memory, room)
    assert advice.override == override
    if override != "search=true":
        assert needs(laid_out(*overrides, *override.split())) <= room.available
        assert "estimated to fit" in advice.change
        assert advice.override == " ".join(one.override for one in advice.changes)
        *before, last = advice.changes
        assert last.fits
        assert not any(one.fits for one in before)


def test_copies_of_slices_are_given_up_before_precision_is(composed, lay_out):
    copies = "mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2", "data.batch_size=8", REMAT
    program = lay_out(composed(*GPT2, *copies), "v5e-4x2")
    room = MemoryBudget(*[needs(program) - MIB] * 3)
    advice = make_fit(program, estimate_memory(program), room)
    all_of_it = "mesh.data=1 mesh.fsdp=8 mesh.dcn.data=1 mesh.dcn.fsdp=2"
    assert advice.override == all_of_it
    sharded = lay_out(composed(*GPT2, *copies, *all_of_it.split()), "v5e-4x2")
    assert needs(sharded) <= room.available


@pytest.mark.parametrize(
    ("mib", "override"),
    [
        (800, "optimizer.moment_dtype=bfloat16"),
        pytest.param(
            460,
            "optimizer.moment_dtype=int8 optimizer.offload=true "
            "train.offload=[residual]",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_costs_more_is_advised_where_nothing_else_does_it(laid_out, mib, override):
    """A batch of one row a device, which nothing cuts."""
    overrides = ("mesh=fsdp", "data.batch_size=8", REMAT, "model.num_layers=48")
    program, room = laid_out(*overrides), MemoryBudget(*[mib * MIB] * 3)
    advice = make_fit(program, estimate_memory(program), room)
    assert advice.override == override
    moved = laid_out(*overrides, *override.split())
    assert needs(moved) <= room.available
    memory = estimate_memory(moved)
    size = sum(map(bytes_per_device, moved.host_state.values()))
    assert ("optimizer state" in memory.host) == (size > 0)
    if size:
        assert memory.host["optimizer state"].bytes == pytest.approx(size, rel=0.01)
    assert memory.host_held == 8 * sum(part.bytes for part in memory.host.values())


def test_rows_that_a_pipeline_cuts_are_not_cut_twice(laid_out):
    """Four rows a device, each a microbatch of the pipeline's already."""
    piped = "mesh.pipeline=2", "train.pipeline_microbatches=8", "data.batch_size=32"
    program = laid_out("mesh=fsdp", *piped, REMAT)
    room = MemoryBudget(*[needs(program) - MIB] * 3)
    advice = make_fit(program, estimate_memory(program), room)
    assert "accumulation_steps" not in advice.override


def test_what_the_compiler_needs_more_stays(laid_out):
    program = laid_out("mesh=ddp", "data.batch_size=64")
    memory = estimate_memory(program)
    room = MemoryBudget(*[needs(program) - MIB] * 3)
    most = format_policy(policies_keeping_less(program.config.train.remat)[0])
    assert make_fit(program, memory, room).override == f"train.remat={most}"
    saved = needs(program) - needs(laid_out("mesh=ddp", "data.batch_size=64", REMAT))
    large = Figure(room.available + saved + MIB, "compiled")
    advice = make_fit(program, dataclasses.replace(memory, needed=large), room)
    assert advice.override.startswith(f"{REMAT} ")


def test_what_is_needed_and_what_each_change_leaves_is_said(laid_out, capsys):
    program = laid_out("mesh=ddp", "data.batch_size=8")
    memory = estimate_memory(program)
    held = memory.held
    large = Figure(24 * 1024 * MIB, "compiled")
    memory = dataclasses.replace(memory, needed=large)
    advice = make_fit(program, memory, MemoryBudget(*[15 * 1024 * MIB] * 3))
    assert "a device needs 24.00 GiB, 9.00 GiB more" in advice.bottleneck
    assert f"take {held / MIB / 1024:.2f} GiB" in advice.bottleneck
    assert "are not enough: use more or larger chips" in advice.change
    assert len(advice.change.split()) < 30
    assert len(advice.changes) == 5
    needed = [one.needed_bytes for one in advice.changes]
    assert needed == sorted(needed, reverse=True)
    print_remedy(advice)
    printed = capsys.readouterr().out.splitlines()
    for one in advice.changes:
        (row,) = (line for line in printed if line.startswith(f"{one.override} "))
        assert format_bytes(one.needed_bytes) in row
        assert row.endswith("no")
    assert "use moments in host memory" in {one.change for one in advice.changes}


@pytest.mark.slow
def test_what_cannot_be_sharded_so_far_is_not_advised(laid_out):
    odd = ("model.num_heads=11", "model.embed_dim=748", "model.head_dim=68")
    program = laid_out("mesh=ddp", "data.batch_size=8", *odd)
    advice = make_fit(program, estimate_memory(program), MemoryBudget(MIB, MIB, MIB))
    assert not any("fsdp" in one.override for one in advice.changes)
