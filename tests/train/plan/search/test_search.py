"""A search returns the fastest layout that fits; functions replace compilers."""

import dataclasses

import jax
import pytest

from tests.train.plan.search.conftest import FEW, LARGE, MODEL, budget
from train.errors import DOES_NOT_FIT, Exit
from train.plan.budget import budget_of
from train.plan.config import PlanConfig
from train.plan.plan import estimate
from train.plan.recomputing import format_policy
from train.plan.search import search as searching
from train.plan.search import weigh
from train.plan.search.candidates import Layout
from train.plan.search.result import frontier, print_result
from train.plan.search.search import Search
from train.resolve.program import make_program


@pytest.fixture
def compilers(monkeypatch):
    """Replace compilers with functions of the estimated plan, and list the calls."""
    calls = []

    def replace_compiler(name, method, size):
        def compile_program(program, budget):
            calls.append(method)
            plan = estimate(program, budget)
            needed = dataclasses.replace(
                plan.memory.needed, bytes=size(plan), how=method
            )
            memory = dataclasses.replace(plan.memory, needed=needed)
            return dataclasses.replace(plan, memory=memory)

        monkeypatch.setattr(searching, name, compile_program)

    def compilers(small, full):
        replace_compiler("compile_small", "extrapolated", small)
        replace_compiler("compile_and_read", "compiled", full)
        return calls

    return compilers


@pytest.mark.slow
def test_the_fastest_layout_that_fits_is_best(composed, devices, capsys):
    # The search does not list this mesh.
    config = composed([*MODEL, "mesh=fsdp", "mesh.context=2"])
    result = Search(config, devices, budget(LARGE)).run()
    best = min((c for c in result.weighed if c.fits), key=lambda c: c.step_s)
    assert result.best == best
    (configured,) = (c for c in result.weighed if c.layout == result.given)
    plan = estimate(make_program(config, devices))
    assert configured.needed == plan.memory.needed.bytes
    # Twelve heads cannot be sharded over eight devices.
    assert {*result.excluded} == {"mesh.params.heads", "mesh.params.kv_heads"}
    smallest = min(result.weighed, key=lambda c: c.needed)
    assert {best, smallest} <= {*frontier(result.weighed)}
    print_result(result, config.mesh)
    printed = capsys.readouterr().out
    assert "the first of them: mesh.params.heads=tensor puts" in printed
    assert f"{configured.layout.overrides(config.mesh)} (this config's)" in printed
    assert f"best        {best.layout.overrides(config.mesh)}" in printed
    assert "compile this layout" in printed


def test_a_layout_that_cannot_be_estimated_is_counted_with_the_reason(
    composed, config, devices, monkeypatch, capsys
):
    original = weigh.estimate

    def fail(program, budget):
        if program.mesh.shape["tensor"] == 2:
            raise ValueError("no such kernel")
        return original(program, budget)

    monkeypatch.setattr(weigh, "estimate", fail)
    result = Search(config, devices, budget(LARGE)).run()
    assert all(c.layout.tensor != 2 for c in result.weighed)
    print_result(result, config.mesh)
    printed = capsys.readouterr().out
    assert "mesh.tensor=2" in result.failed["ValueError"]
    assert result.failed["ValueError"] in printed
    monkeypatch.setattr(weigh, "layouts", lambda *_: [Layout(1, 4, 2)])
    with pytest.raises(RuntimeError, match="ValueError: no such kernel"):
        Search(composed([*MODEL, "mesh=planned"]), devices, budget(LARGE)).run()


def test_a_search_is_cached(composed, config, devices, monkeypatch):
    beats = []
    result = Search(config, devices, budget(LARGE), beat=lambda: beats.append(1)).run()
    assert len(beats) >= len(result.weighed)
    monkeypatch.delattr(searching, "Weighing")
    second = Search(composed([*MODEL, "mesh=fsdp"]), devices, budget(LARGE)).run()
    assert second.weighed == result.weighed
    assert second.given != result.given
    plan = PlanConfig(**{**vars(config), "seed": 1}, search_compiles=0)
    assert Search(plan, devices, budget(LARGE)).run() == result
    for change in ("runtime.sparse_cores=false", "model.num_layers=6"):
        with pytest.raises(NameError):
            Search(composed([*MODEL, change]), devices, budget(LARGE)).run()


def test_finalists_are_compiled_as_small_copies_and_the_best_in_full(
    config, devices, compilers
):
    calls = compilers(lambda plan: LARGE, lambda plan: LARGE)
    result = Search(config, devices, budget(LARGE)).run(compiles=4)
    assert calls == 4 * ["extrapolated"] + ["compiled"]
    assert result.best.how == "compiled"
    layouts = [c.layout for c in result.compiled]
    assert result.given in layouts
    assert {layout.remat for layout in layouts} == {*map(format_policy, FEW)}
    assert Search(config, devices, budget(LARGE)).run(compiles=4) == result
    assert len(calls) == 5


def test_if_the_best_does_not_fit_the_next_is_compiled(config, devices, compilers):
    sizes = [LARGE + 1, LARGE]
    calls = compilers(lambda plan: LARGE, lambda plan: sizes.pop(0))
    result = Search(config, devices, budget(LARGE)).run(compiles=3)
    assert calls == 3 * ["extrapolated"] + 2 * ["compiled"]
    assert result.best.how == "compiled"
    assert result.compiled[-1].needed == LARGE + 1


def test_compiling_continues_until_a_layout_fits(config, devices, compilers):
    """Only the smallest layout is likely to fit, if all have the gap of the first."""
    limit = budget(LARGE)
    smallest = min(c.needed for c in Search(config, devices, limit).run().weighed)
    calls = compilers(*2 * [lambda plan: plan.memory.needed.bytes + LARGE - smallest])
    search = Search(config, devices, limit)
    assert search.run(compiles=1, minutes=0).compiled == calls == []
    result = search.run(compiles=1)
    assert result.best.needed == LARGE
    assert calls == ["extrapolated", "extrapolated", "compiled"]


def test_without_a_compiler_a_margin_is_left(config, devices):
    """The needed memory is a lower bound if nothing is compiled."""
    candidates = Search(config, devices, budget(LARGE)).run().weighed
    fastest = candidates[0]
    smallest = min(candidates, key=lambda c: c.needed)
    safe = next(c for c in candidates if c.needed < 0.85 * fastest.needed)
    sizes = {
        2 * fastest.needed: fastest,
        fastest.needed: safe,
        smallest.needed: smallest,
    }
    for size, expected in sizes.items():
        assert Search(config, devices, budget(size)).choose() == expected.layout


def test_if_none_fits_the_closest_is_named(config, devices, capsys):
    result = Search(config, devices, budget(2**20)).run()
    assert result.best is None
    smallest = min(result.weighed, key=lambda c: c.needed)
    print_result(result, config.mesh)
    printed = capsys.readouterr().out
    assert f"needed by {smallest.layout.overrides(config.mesh)}" in printed
    with pytest.raises(Exit, match="none fits") as error:
        Search(config, devices, budget_of(devices, margin=0.99999)).choose()
    assert error.value.code == DOES_NOT_FIT


def test_devices_of_unknown_rates_are_all_on_fsdp(config):
    devices = jax.devices()
    layout = Search(config, devices, budget_of(devices)).choose()
    assert (layout.data, layout.fsdp, layout.tensor) == (1, 8, 1)
