"""A fit advises the changes that make a step fit in memory."""

import dataclasses

import jax
import pytest

from train.plan.advice import print_remedy
from train.plan.budget import MemoryBudget
from train.plan.estimated.step import estimate_memory
from train.plan.fit import make_fit
from train.plan.memory import Figure
from train.units import format_bytes

MIB = 2**20
GPT2 = (
    *("model=gpt2_124m", "model.vocab_size=50304", "optimizer=adamw"),
    "data.sequence_length=1024",
)
SHARD = "mesh.data=1 mesh.fsdp=8"
REMAT = "train.remat=full"
SPLIT = "train.accumulation_steps="
DEEP = f"mesh=fsdp data.batch_size=8 model.num_layers=48 {REMAT}"
SAVING = "optimizer.moment_dtype=int8 optimizer.offload=true train.offload=[residual]"


@pytest.fixture
def laid_out(composed, lay_out, monkeypatch):
    """Return a function that lays a model out on eight absent chips of a new libtpu."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    return lambda overrides: lay_out(composed([*GPT2, *overrides]), "v5e-8")


def needed_bytes(program) -> int:
    return estimate_memory(program).needed.bytes


def fit(program, memory, available):
    budget = MemoryBudget(available, available, available)
    return make_fit(program, memory, budget, searchable=True)


@pytest.mark.parametrize(
    ("overrides", "advised"),
    [
        ("mesh=ddp data.batch_size=8", SHARD),
        pytest.param(
            "mesh=ddp data.batch_size=64",
            f"{SHARD} train.remat=[attention]",
            marks=pytest.mark.slow,
        ),
        ("mesh=ddp data.batch_size=512", f"{SHARD} {REMAT} {SPLIT}4"),
        (f"mesh=fsdp data.batch_size=512 {REMAT}", f"{SPLIT}2"),
        # One row on each device cannot be split, so the state must become smaller.
        (DEEP, "optimizer.moment_dtype=bfloat16"),
        pytest.param(DEEP, SAVING, marks=pytest.mark.slow),
    ],
)
def test_the_advised_changes_fit_only_with_the_last_one(laid_out, overrides, advised):
    program = laid_out(overrides.split())
    available = needed_bytes(laid_out([*overrides.split(), *advised.split()]))
    advice = fit(program, estimate_memory(program), available)
    assert advice.override == advised
    *previous, last = advice.changes
    assert last.fits
    assert not any(change.fits for change in previous)


@pytest.mark.slow
def test_insufficient_changes_are_listed_with_what_remains(laid_out, capsys):
    program = laid_out(["mesh=ddp", "data.batch_size=8"])
    compiled = Figure(24 * 1024 * MIB, "compiled")
    memory = dataclasses.replace(estimate_memory(program), needed=compiled)
    advice = fit(program, memory, 15 * 1024 * MIB)
    assert "a device needs 24.00 GiB, 9.00 GiB more" in advice.bottleneck
    assert advice.override == "search=true"
    needed = [change.needed_bytes for change in advice.changes]
    assert needed == sorted(needed, reverse=True)
    print_remedy(advice)
    printed = capsys.readouterr().out
    assert all(c.override in printed for c in advice.changes)
    assert all(format_bytes(size) in printed for size in needed)
