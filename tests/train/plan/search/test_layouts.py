"""Which layouts and changes the search weighs, on stand-ins: nothing is compiled."""

import jax
import pytest

from tests.train.plan.search.conftest import MODEL
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan import precision, recomputing
from train.plan.budget import MemoryBudget, memory_budget
from train.plan.plan import estimate
from train.plan.precision import CHANGES, combinations, with_changes
from train.plan.recomputing import POLICIES
from train.plan.search import weigh
from train.plan.search.result import (
    none_fits,
    print_result,
)
from train.plan.search.search import search
from train.program import make_program

pytestmark = pytest.mark.usefixtures("estimated_once")


def test_microbatches_are_those_that_a_pipeline_can_cut_once_more(
    composed, two_slices, room
):
    """Four rows a device, each of them a microbatch of the pipeline's."""
    rows = "mesh=planned", "data.batch_size=32", "train.pipeline_microbatches=8"
    found = search(composed(*MODEL, *rows), two_slices, room)
    weighed = {
        (one.layout.pipeline, one.layout.accumulation_steps) for one in found.weighed
    }
    assert weighed == {(2, 1), (1, 1), (1, 2), (1, 4)}


def test_what_would_be_refused_if_it_was_typed_is_not_weighed(
    composed, two_slices, room
):
    """Stages, whose moments cannot be in host memory; inputs can, of what is kept."""
    moved = "optimizer=adamw", "optimizer.offload=true", "train.offload=[residual]"
    rows = "mesh=planned", "data.batch_size=8"
    found = search(composed(*MODEL, *rows, *moved), two_slices, room)
    assert {one.layout.pipeline for one in found.weighed} == {1}
    assert set(found.excluded) == {"train.offload", "optimizer.offload"}
    assert "must be false with mesh.pipeline" in found.excluded["optimizer.offload"].why


@pytest.mark.slow
def test_experts_are_laid_out_too(composed, devices, monkeypatch, capsys):
    monkeypatch.setattr(recomputing, "POLICIES", POLICIES[:1])
    devices, room = devices[:4], MemoryBudget(*[2**36] * 3)
    shape = ("model=moe_nano", "model.num_heads=1", "model.num_experts=6")
    rows = ("data.batch_size=4", "data.sequence_length=128", "mesh.expert=2")
    config = composed(*shape, *rows, "mesh=fsdp", "train.remat=full")
    found = search(config, devices, room)
    assert {one.layout.expert for one in found.weighed} == {1, 2}
    assert found.given is not None
    assert found.given.expert == 2
    assert found.best is not None
    assert "which do not divide it" in found.excluded["mesh.params.experts"].why
    print_result(found, config)
    *_, best, last, cost = capsys.readouterr().out.splitlines()
    assert best.endswith(found.best.layout.overrides(config))
    assert found.runner_up is not None
    assert last.endswith(found.runner_up.layout.overrides(config))
    assert found.runner_up.layout.layer_shards != found.best.layout.layer_shards
    assert "% time a step" in cost


@pytest.mark.slow
def test_changes_of_precision_are_weighed_when_asked_for(
    composed, devices, monkeypatch, capsys
):
    """On each layout that none beats; what the chip cannot do is left out."""
    some = "optimizer.moment_dtype=int8", "model.compute_dtype=float8"
    some += ("optimizer.offload=true",)
    monkeypatch.setattr(precision, "CHANGES", {name: CHANGES[name] for name in some})
    monkeypatch.setattr(recomputing, "POLICIES", POLICIES[:1])
    monkeypatch.setattr(weigh, "layouts", lambda *_: [])
    # Which compiles moments of eight bits on a TPU's host.
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    config = composed(*MODEL, "mesh=fsdp", "optimizer=adamw", "train.remat=full")
    least = search(config, devices, MemoryBudget(*[2**34] * 3)).closest
    room = MemoryBudget(*[least.needed - 1] * 3)
    plain = search(config, devices, room)
    assert plain.best is None
    assert "search_precision=true" in none_fits(plain, config)
    found = search(config, devices, room, precision=True)
    weighed = {one.layout.changes: one for one in found.weighed}
    int8, _, offload = ((change,) for change in some)
    assert {*weighed} == {(), int8, offload, (*int8, *offload)}
    assert weighed[offload].needed < weighed[int8].needed < least.needed
    assert weighed[offload].step_s > least.step_s
    assert found.best is not None
    assert found.best.layout.changes == int8
    program = make_program(found.best.layout.applied(config), devices)
    assert estimate(program, room).memory.needed.bytes == found.best.needed
    print_result(found, config)
    printed = capsys.readouterr().out
    assert some[0] in printed.partition("each change by itself; needed")[2]
    assert search(config, devices, room, precision=True) == found
    assert search(config, devices, room) == plain


def test_changes_whose_speed_nobody_states_are_left_out(composed, devices, monkeypatch):
    """How fast a B200 reaches host memory."""
    some = "optimizer.moment_dtype=bfloat16", "optimizer.offload=true"
    monkeypatch.setattr(precision, "CHANGES", {name: CHANGES[name] for name in some})
    monkeypatch.setattr(weigh, "layouts", lambda *_: [])
    config = composed(*MODEL, "mesh=fsdp", "optimizer=adamw")
    target = parse_target("b200-8")
    devices, room = fake_devices(target), memory_budget(target.chip)
    found = search(config, devices, room, precision=True)
    assert {one.layout.changes for one in found.weighed} == {(), some[:1]}


def test_changes_go_with_each_other_but_two_of_one_key_do_not(composed):
    config = composed(*MODEL, "optimizer=adamw")
    found = combinations(config)
    assert len({*found}) == len(found) == 3 * 2 * 2 * 3 - 1
    assert len(found[0]) == 1
    for changes in found:
        assert len({CHANGES[change].key for change in changes}) == len(changes)
    for changes in found[:6]:
        assert with_changes(config, changes) == composed(
            *MODEL, "optimizer=adamw", *changes
        )
    settled = composed(*MODEL, "optimizer.moment_dtype=bfloat16")
    assert not any(
        "moment_dtype" in c for changes in combinations(settled) for c in changes
    )
