"""A search weighs the allowed layouts and changes; nothing is compiled here."""

import jax
import pytest

from tests.train.plan.search.conftest import LARGE, MODEL, budget
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan import precision, recomputing
from train.plan.precision import CHANGES, combinations, with_changes
from train.plan.recomputing import POLICIES
from train.plan.search import weigh
from train.plan.search.candidates import Layout
from train.plan.search.result import none_fits
from train.plan.search.search import Search

MOMENTS = CHANGES[0]
OFFLOAD = CHANGES[1]
ADAMW = (*MODEL, "optimizer=adamw", "train.remat=full")


@pytest.fixture(autouse=True)
def own_mesh_only(devices, monkeypatch):
    monkeypatch.setattr(recomputing, "POLICIES", POLICIES[:1])
    monkeypatch.setattr(weigh, "layouts", lambda *_: [])


def test_layouts_that_a_command_would_refuse_are_not_weighed(composed, monkeypatch):
    """Moments cannot be in host memory if the layout has stages."""
    stages = Layout(1, 4, pipeline=2, dcn_pipeline=2)
    monkeypatch.setattr(weigh, "layouts", lambda *_: [stages, Layout(2, 4, dcn_data=2)])
    offload = "optimizer.offload=true", "train.offload=[residual]"
    config = composed([*ADAMW, "mesh=planned", *offload])
    result = Search(config, fake_devices(parse_target("v5e-4x2")), budget(LARGE)).run()
    assert {c.layout.pipeline for c in result.weighed} == {1}
    assert {*result.excluded} == {"train.offload", "optimizer.offload"}


@pytest.mark.slow
def test_precision_is_changed_only_if_asked_for(composed, devices, monkeypatch):
    float8 = CHANGES[-1][:1]  # The chip cannot multiply float8.
    monkeypatch.setattr(precision, "CHANGES", (MOMENTS[1:], OFFLOAD, float8))
    # This version compiles eight-bit moments on a TPU's host.
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    config = composed([*ADAMW, "mesh=fsdp"])
    (plain,) = Search(config, devices, budget(LARGE)).run().weighed
    limit = budget(plain.needed - 1)
    result = Search(config, devices, limit).run()
    assert result.best is None
    assert "search_precision=true" in none_fits(result, config.mesh)
    result = Search(config, devices, limit, precision=True).run()
    candidates = {c.layout.changes: c for c in result.weighed}
    int8 = (MOMENTS[1].override,)
    offload = (OFFLOAD[0].override,)
    assert {*candidates} == {(), int8, offload, (*int8, *offload)}
    assert candidates[offload].needed < candidates[int8].needed < plain.needed
    assert result.best.layout.changes, "without changes none fits"


def test_a_combination_has_at_most_one_change_of_a_key(composed):
    selections = combinations(composed(ADAMW))
    assert len({*selections}) == len(selections) == 3 * 2 * 2 * 3 - 1
    for changes in selections:
        assert len({change.partition("=")[0] for change in changes}) == len(changes)
    changes = max(selections, key=len)
    assert with_changes(composed(ADAMW), changes) == composed([*ADAMW, *changes])
    bfloat16 = composed([*ADAMW, "optimizer.moment_dtype=bfloat16"])
    assert not any("moment_dtype" in " ".join(c) for c in combinations(bfloat16))
