"""The fastest layout that fits; compilers are replaced by functions."""

import dataclasses
import itertools

import jax
import pytest

from tests.train.plan.search.conftest import FEW, MODEL, budget
from train.errors import DOES_NOT_FIT, ConfigError, Exit
from train.hardware import devices as topology
from train.plan.config import PlanConfig
from train.plan.plan import estimate
from train.plan.recomputing import format_policy
from train.plan.search import search as searching
from train.plan.search import weigh
from train.plan.search.result import frontier, none_fits, print_result
from train.plan.search.search import choose, search
from train.program import make_program


def needing(size, how, seen=None):
    """Return a compiler of steps that need a size, or one that depends on the plan."""

    def make_plan(program, budget):
        plan = estimate(program, budget)
        if seen is not None:
            seen.append((how, program.config))
        needed = size(plan) if callable(size) else size
        figure = dataclasses.replace(plan.memory.needed, bytes=needed, how=how)
        memory = dataclasses.replace(plan.memory, needed=figure)
        return dataclasses.replace(plan, memory=memory)

    return make_plan


@pytest.fixture
def compilers(monkeypatch):
    """Replace the compilers of small copies and of whole programs."""

    def compilers(small, whole):
        compiled = list[tuple[str, object]]()
        make_small = needing(small, "extrapolated", compiled)
        monkeypatch.setattr(searching, "compile_small", make_small)
        make_whole = needing(whole, "compiled", compiled)
        monkeypatch.setattr(searching, "compile_and_read", make_whole)
        return compiled

    return compilers


def test_the_fastest_layout_that_fits_is_best(config, devices, room, capsys):
    result = search(config, devices, room)
    assert len(result.weighed) >= 50
    assert result.best is not None
    assert result.best.step_s == min(c.step_s for c in result.weighed if c.fits)
    (given,) = (c for c in result.weighed if c.layout == result.given)
    as_given = estimate(make_program(config, devices))
    assert given.needed == as_given.memory.needed.bytes
    # Twelve heads cannot be sharded over eight or sixteen devices.
    assert set(result.excluded) == {"mesh.params.heads", "mesh.params.kv_heads"}
    assert result.excluded["mesh.params.heads"].meshes == 3
    fitting = [c for c in result.weighed if c.fits]
    for faster, slower in itertools.pairwise(frontier(fitting)):
        assert faster.step_s <= slower.step_s
        assert faster.needed > slower.needed
    print_result(result, config)
    printed = capsys.readouterr().out
    assert "the first of them: mesh.params.heads=tensor puts" in printed
    assert f"{given.layout.overrides(config)} (this config's)" in printed
    assert f"best        {result.best.layout.overrides(config)}" in printed
    assert "compile this layout" in printed


def test_a_layout_that_cannot_be_estimated_is_counted_with_the_reason(
    config, devices, room, monkeypatch, capsys
):
    known = weigh.estimate

    def fail(program, budget):
        if program.mesh.shape["tensor"] == 2:
            raise ValueError("no such kernel")
        return known(program, budget)

    monkeypatch.setattr(weigh, "estimate", fail)
    result = search(config, devices, room)
    assert all(c.layout.tensor != 2 for c in result.weighed)
    (failed,) = result.failed.values()
    print_result(result, config)
    printed = capsys.readouterr().out
    assert f"{failed.layouts} layouts could not be" in printed
    reason = f"first is {failed.first.overrides(config)}: ValueError: no such kernel"
    assert reason in printed
    monkeypatch.setattr(weigh, "layouts", lambda *_: [failed.first])
    with pytest.raises(RuntimeError, match="ValueError: no such kernel"):
        search(dataclasses.replace(config, mesh=failed.first), devices, room)


def test_a_search_is_cached(config, devices, room, monkeypatch):
    beats = []
    result = search(config, devices, room, beat=lambda: beats.append(1))
    assert len(beats) >= len(result.weighed)
    monkeypatch.delattr(searching, "Weighing")
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=-1)
    other = search(dataclasses.replace(config, mesh=mesh), devices, room)
    assert other.weighed == result.weighed
    assert other.given != result.given
    assert search(dataclasses.replace(config, seed=1), devices, room) == result
    plan = PlanConfig(**vars(config), target="v5e-16", search=True, search_compiles=0)
    assert search(plan, devices, room) == result
    for section, change in (("runtime", "sparse_cores"), ("model", "num_layers")):
        other = dataclasses.replace(getattr(config, section), **{change: 6})
        with pytest.raises(NameError):
            search(dataclasses.replace(config, **{section: other}), devices, room)


def test_finalists_are_compiled_small_and_the_best_of_them_whole(
    config, devices, room, compilers
):
    compiled = compilers(room.available, room.available)
    result = search(config, devices, room, compiles=4)
    assert [how for how, _ in compiled] == 4 * ["extrapolated"] + ["compiled"]
    assert [c.how for c in result.compiled].count("compiled") == 1
    assert result.best is not None
    assert result.best.how == "compiled"
    layouts = [c.layout for c in result.compiled]
    assert result.given in layouts
    assert {layout.remat for layout in layouts} == {*map(format_policy, FEW)}
    assert search(config, devices, room, compiles=4) == result
    assert len(compiled) == 5
    assert choose(config, devices) == result.best.layout


def test_if_the_best_does_not_fit_after_all_the_next_is_compiled(
    config, devices, room, compilers
):
    compiled = compilers(room.available, lambda plan: limits.pop(0))
    limits = [room.available + 1, room.available]
    result = search(config, devices, room, compiles=3)
    assert [how for how, _ in compiled] == 3 * ["extrapolated"] + 2 * ["compiled"]
    assert result.best is not None
    assert result.best.how == "compiled"
    assert result.compiled[-1].needed == room.available + 1


def test_more_are_compiled_until_one_fits_and_hopeless_ones_last(
    config, devices, compilers
):
    """The compiler needs a third more than each estimate."""
    estimates = sorted(c.needed for c in search(config, devices, budget(2**36)).weighed)
    room = budget(estimates[len(estimates) // 3])

    def needed(plan):
        return plan.memory.needed.bytes * 4 // 3

    compiled = compilers(needed, needed)
    result = search(config, devices, room, compiles=1)
    assert result.best is not None
    assert result.best.needed <= room.available
    assert len(compiled) <= 6
    assert compilers(room.available + 1, 0) == []
    assert search(config, devices, room, compiles=9, minutes=0).compiled == []


def test_training_leaves_a_margin_for_what_an_estimate_omits(
    config, devices, monkeypatch
):
    """Without a compiler, the needed memory is a lower bound."""
    result = search(config, devices, budget(2**36))
    fastest, tightest = result.weighed[0], min(c.needed for c in result.weighed)
    for available, fits in ((2 * fastest.needed, True), (fastest.needed, False)):
        monkeypatch.setattr(searching, "memory_budget", lambda *_, **__: room)
        room = budget(available)
        assert search(config, devices, room).best.layout == fastest.layout
        assert (choose(config, devices) == fastest.layout) == fits
    room = budget(tightest)  # No layout leaves anything.
    (only,) = (c.layout for c in result.weighed if c.needed == tightest)
    assert choose(config, devices) == only


@pytest.mark.slow
def test_if_none_fits_the_closest_is_named(config, devices, capsys):
    result = search(config, devices, budget(2**20))
    assert result.best is None
    least = min(result.weighed, key=lambda c: c.needed)
    print_result(result, config)
    printed = capsys.readouterr().out
    assert f"needed by {least.layout.overrides(config)}" in printed
    assert "sequence_length" not in printed  # Even the state does not fit.
    own, row = (line for line in printed.splitlines() if line.startswith("no "))
    assert own.endswith("(this config's)") != row.endswith("(this config's)")
    with pytest.raises(Exit, match="none fits") as raised:
        choose(config, devices, margin=0.99999)
    assert raised.value.code == DOES_NOT_FIT
    room = budget((least.held + least.needed) // 2)
    assert "sequence_length" in none_fits(search(config, devices, room), config)


@pytest.mark.slow
def test_the_memory_of_real_devices_is_read(config, devices, monkeypatch):
    little = {"bytes_limit": 2**20}
    device = topology.StandIn
    monkeypatch.setattr(device, "memory_stats", lambda _: little, raising=False)
    with pytest.raises(Exit, match=r"Only 1\.00 MiB are available"):
        choose(config, devices, margin=0.0)


@pytest.mark.slow
def test_the_configs_own_layout_is_weighed_even_if_no_search_lists_it(
    composed, two_slices, room
):
    cut = "mesh=fsdp_tensor", "mesh.tensor=2", "mesh.dcn.tensor=2"
    result = search(composed(*MODEL, *cut), two_slices, room)
    assert result.given is not None
    assert result.given in {c.layout for c in result.weighed}
    assert (result.given.tensor, result.given.dcn_tensor) == (2, 2)


def test_if_no_mesh_is_possible_all_mistakes_are_listed(composed, devices, room):
    odd = ("model.num_heads=3", "model.head_dim=64", "data.batch_size=1")
    with pytest.raises(ConfigError) as error:
        search(composed(*MODEL, *odd), devices, room)
    keys = {mistake.key for mistake in error.value.mistakes}
    assert keys == {"data.batch_size", "mesh.params.heads", "mesh.params.kv_heads"}


def test_devices_of_unknown_rates_are_all_on_fsdp(config):
    layout = choose(config, jax.devices())
    assert (layout.data, layout.fsdp, layout.tensor) == (1, 8, 1)
