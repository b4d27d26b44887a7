"""The computed figures of what a device holds are exact."""

import dataclasses

import jax
import pytest

from train.hardware.targets import parse_target
from train.plan.aot import OutOfMemory
from train.plan.budget import memory_budget
from train.plan.memory import Figure, device_memory, judge, print_memory

GB = 2**30


@pytest.fixture
def laid_out(configure, lay_out):
    """Return a function: (target, overrides) -> a tiny laid-out program."""
    return lambda target, overrides: lay_out(
        configure(["model.attention=xla", *overrides]), target
    )


@pytest.mark.parametrize("mesh", ["single", "ddp", "fsdp", "fsdp_tensor"])
def test_state_is_what_the_first_device_really_holds(programs, mesh):
    program = programs([f"mesh={mesh}"], devices=1 if mesh == "single" else 4)
    parts = device_memory(program).parts
    state = program.init()
    expected = {
        name: sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves(state._replace(**omitted))
        )
        for name, omitted in (
            ("parameters", {"step": None, "optimizer": None, "recent": None}),
            ("optimizer state", {"params": None}),
        )
    }
    assert {name: parts[name].bytes for name in expected} == expected
    assert parts["gradients"] == parts["parameters"]
    rows, length = program.batch.inputs.shape
    shards = 1 if mesh == "single" else program.mesh.shape["fsdp"]
    shards *= program.mesh.shape["data"]
    fields = len(jax.tree.leaves(program.batch))
    assert parts["batch"].bytes == fields * rows * length * 4 // shards
    assert {figure.how for figure in parts.values()} == {"computed"}


def state_bytes(program) -> int:
    leaves = jax.tree.leaves(program.state)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["mesh=ddp"], 1),  # Four copies on a host are saved once.
        (["mesh=fsdp"], 2),
        (["mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2"], 1),
    ],
)
def test_a_host_copies_what_its_devices_hold_once(laid_out, overrides, part):
    program = laid_out("h100-4x2", overrides)
    ledger = device_memory(program)
    assert ledger.checkpoint == Figure(state_bytes(program), "computed")
    # Counters are replicated.
    assert ledger.host_save.bytes == pytest.approx(
        state_bytes(program) / part, rel=0.01
    )
    assert ledger.host_save.bytes >= state_bytes(program) // part


def test_a_step_that_is_out_of_memory_does_not_fit(laid_out):
    ledger = device_memory(
        laid_out("v5e-8", ["mesh=fsdp"]), OutOfMemory(20 * GB, int(15.75 * GB))
    )
    assert ledger.needed == Figure(20 * GB, "compiled")
    assert ledger.fits(memory_budget(parse_target("v5e-8").chip, 0.0)) is False


@pytest.mark.parametrize(("name", "noted"), [("h100-8", True), ("v5e-8", False)])
def test_a_gpus_smaller_budget_is_explained_and_empty_items_are_left_out(
    laid_out, monkeypatch, capsys, name, noted
):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    ledger = device_memory(laid_out(name, ["mesh=fsdp"]))
    items = {"one layer": Figure(1, "estimated"), "logits": Figure(0, "estimated")}
    ledger = dataclasses.replace(ledger, temporaries=items)
    print_memory(ledger, memory_budget(parse_target(name).chip, 0.05), None)
    printed = capsys.readouterr().out
    assert ("50% of a GPU" in printed) is noted
    assert ("XLA_CLIENT_MEM_FRACTION=" in printed) is noted
    assert "\none layer " in printed
    assert "- logits" not in printed


@pytest.mark.parametrize(
    ("how", "needed", "verdict"),
    [
        ("lower bound", 3, ("not known", "compile the step to know")),
        ("lower bound", 5, ("no", "1.00 GiB too much")),
        ("compiled", 3, ("yes", "1.00 GiB to spare")),
        ("extrapolated", 4, ("yes", "0 B to spare")),
        ("compiled", 6, ("no", "2.00 GiB too much")),
    ],
)
def test_a_lower_bound_that_fits_decides_nothing(how, needed, verdict):
    assert judge(Figure(needed * GB, how), 4 * GB) == verdict
