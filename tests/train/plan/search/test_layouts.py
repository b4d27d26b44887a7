"""Which layouts and changes a search weighs; nothing is compiled."""

import jax
import pytest

from tests.train.plan.search.conftest import MODEL, budget
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan import precision, recomputing
from train.plan.budget import memory_budget
from train.plan.precision import CHANGES, combinations, with_changes
from train.plan.recomputing import POLICIES
from train.plan.search import weigh
from train.plan.search.result import none_fits
from train.plan.search.search import search

MOMENTS, OFFLOAD = CHANGES[0], CHANGES[1]
ADAMW = "optimizer=adamw"


def test_layouts_that_a_command_would_refuse_are_not_weighed(
    composed, two_slices, room
):
    """With stages, moments cannot be in host memory."""
    offload = ADAMW, "optimizer.offload=true", "train.offload=[residual]"
    rows = "mesh=planned", "data.batch_size=8"
    result = search(composed(*MODEL, *rows, *offload), two_slices, room)
    assert {c.layout.pipeline for c in result.weighed} == {1}
    assert set(result.excluded) == {"train.offload", "optimizer.offload"}
    why = result.excluded["optimizer.offload"].why
    assert "must be false with mesh.pipeline" in why


@pytest.mark.slow
def test_experts_are_sharded_too(composed, devices, monkeypatch):
    monkeypatch.setattr(recomputing, "POLICIES", POLICIES[:1])
    shape = ("model=moe_nano", "model.num_heads=1", "model.num_experts=6")
    rows = ("data.batch_size=4", "data.sequence_length=128", "mesh.expert=2")
    config = composed(*shape, *rows, "mesh=fsdp", "train.remat=full")
    result = search(config, devices[:4], budget(2**36))
    assert {c.layout.expert for c in result.weighed} == {1, 2}
    assert result.given is not None
    assert result.given.expert == 2
    assert "which do not divide it" in result.excluded["mesh.params.experts"].why


@pytest.mark.slow
def test_precision_is_changed_only_if_asked_for(composed, devices, monkeypatch):
    float8 = CHANGES[-1][:1]  # The chip cannot multiply float8.
    monkeypatch.setattr(precision, "CHANGES", (MOMENTS[1:], OFFLOAD, float8))
    monkeypatch.setattr(recomputing, "POLICIES", POLICIES[:1])
    monkeypatch.setattr(weigh, "layouts", lambda *_: [])
    # This version compiles eight-bit moments on a TPU's host.
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    config = composed(*MODEL, "mesh=fsdp", ADAMW, "train.remat=full")
    least = search(config, devices, budget(2**34)).weighed[-1]
    room = budget(least.needed - 1)
    plain = search(config, devices, room)
    assert plain.best is None
    assert "search_precision=true" in none_fits(plain, config)
    result = search(config, devices, room, precision=True)
    weighed = {c.layout.changes: c for c in result.weighed}
    int8, offload = (MOMENTS[1].override,), (OFFLOAD[0].override,)
    assert {*weighed} == {(), int8, offload, (*int8, *offload)}
    assert weighed[offload].needed < weighed[int8].needed < least.needed
    assert result.best is not None
    assert result.best.layout.changes == int8
    assert search(config, devices, room, precision=True) == result
    assert search(config, devices, room) == plain


def test_changes_of_unknown_speed_are_not_weighed(composed, devices, monkeypatch):
    """The rate at which a B200 reaches host memory is unknown."""
    monkeypatch.setattr(precision, "CHANGES", (MOMENTS[:1], OFFLOAD))
    monkeypatch.setattr(weigh, "layouts", lambda *_: [])
    config = composed(*MODEL, "mesh=fsdp", ADAMW)
    target = parse_target("b200-8")
    devices, room = fake_devices(target), memory_budget(target.chip)
    result = search(config, devices, room, precision=True)
    changes = {c.layout.changes for c in result.weighed}
    assert changes == {(), (MOMENTS[0].override,)}


def test_a_combination_has_at_most_one_change_of_a_key(composed):
    config = composed(*MODEL, ADAMW)
    selections = combinations(config)
    assert len({*selections}) == len(selections) == 3 * 2 * 2 * 3 - 1
    for changes in selections:
        keys = {change.partition("=")[0] for change in changes}
        assert len(keys) == len(changes)
    changes = max(selections, key=len)
    assert with_changes(config, changes) == composed(*MODEL, ADAMW, *changes)
    bfloat16 = composed(*MODEL, ADAMW, "optimizer.moment_dtype=bfloat16")
    assert not any("moment_dtype" in " ".join(c) for c in combinations(bfloat16))
