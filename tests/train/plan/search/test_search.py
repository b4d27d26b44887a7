"""The fastest layout that fits, on stand-ins: nothing is compiled."""

import dataclasses
import itertools

import jax
import pytest

from tests.train.plan.search.conftest import FEW, MODEL
from train.errors import DOES_NOT_FIT, ConfigError, Exit
from train.hardware import devices as topology
from train.plan.aot import OutOfMemory
from train.plan.budget import MemoryBudget
from train.plan.config import PlanConfig
from train.plan.plan import estimate
from train.plan.recomputing import format_policy
from train.plan.search import search as searching
from train.plan.search import weigh
from train.plan.search.result import (
    frontier,
    none_fits,
    print_result,
)
from train.plan.search.search import choose, search
from train.program import make_program
from train.units import format_bytes

pytestmark = pytest.mark.usefixtures("estimated_once")


def test_all_are_weighed_and_the_fastest_that_fits_is_best(config, devices, room):
    found = search(config, devices, room)
    assert len(found.weighed) >= 50
    fitting = [one for one in found.weighed if one.fits]
    best = found.best
    assert best is not None
    assert best.step_s == min(one.step_s for one in fitting)
    assert found.given is not None
    (given,) = [one for one in found.weighed if one.layout == found.given]
    assert best.step_s <= given.step_s
    as_given = estimate(make_program(config, devices))
    assert given.needed == as_given.memory.needed.bytes
    # Twelve heads cannot be cut into eight parts or sixteen.
    assert set(found.excluded) == {"mesh.params.heads", "mesh.params.kv_heads"}
    heads = found.excluded["mesh.params.heads"]
    assert heads.meshes == 3  # of 5 + 4 + 3 + 2 + 1; data x fsdp = 2, and 1
    assert "mesh.params.heads=tensor puts the heads dim 12 of" in heads.why
    assert "on 8 devices, which do not divide it" in heads.why


def test_a_layout_that_cannot_be_estimated_is_counted_with_the_reason(
    config, devices, room, monkeypatch, capsys
):
    known = weigh.estimate

    def estimated(program, budget):
        if program.mesh.shape["tensor"] == 2:
            raise ValueError("no such kernel")
        return known(program, budget)

    monkeypatch.setattr(weigh, "estimate", estimated)
    found = search(config, devices, room)
    assert found.best is not None
    assert all(one.layout.tensor != 2 for one in found.weighed)
    (failed,) = found.failed.values()
    print_result(found, config)
    said = f"first is {failed.first.overrides(config)}: ValueError: no such"
    assert f"{failed.layouts} layouts could not be" in (out := capsys.readouterr().out)
    assert said in out


def test_where_no_layout_can_be_estimated_the_error_is_raised(
    composed, devices, room, monkeypatch
):
    def estimated(program, budget):
        raise ValueError("no such kernel")

    monkeypatch.setattr(weigh, "estimate", estimated)
    with pytest.raises(ValueError, match="no such kernel"):
        search(composed(*MODEL, "model.num_layers=6"), devices, room)


def test_what_was_found_is_not_looked_for_again(config, devices, room, monkeypatch):
    found = search(config, devices, room)
    monkeypatch.delattr(searching, "weigh_all")
    assert search(config, devices, room) == found
    other = dataclasses.replace(
        config, mesh=dataclasses.replace(config.mesh, data=1, fsdp=-1)
    )
    again = search(other, devices, room)  # its own layout is one of those weighed
    assert again.weighed == found.weighed
    assert again.given != found.given
    assert search(dataclasses.replace(config, seed=1), devices, room) == found
    asked = PlanConfig(**vars(config), target="v5e-16", search=True, search_compiles=0)
    assert search(asked, devices, room) == found
    runtime = dataclasses.replace(config.runtime, sparse_cores=False)
    with pytest.raises(NameError):  # it changes what is scheduled beside products
        search(dataclasses.replace(config, runtime=runtime), devices, room)
    model = dataclasses.replace(config.model, num_layers=6)
    with pytest.raises(NameError):
        search(dataclasses.replace(config, model=model), devices, room)


def test_a_search_gives_a_sign_of_life_for_each_mesh(config, devices, room):
    beats = []
    found = search(config, devices, room, beat=lambda: beats.append(1))
    assert len(beats) > len({one.layout.layer_shards for one in found.weighed})


def test_the_best_and_the_one_given_are_compiled(config, devices, room, monkeypatch):
    """What the compiler says wins over what was estimated."""
    seen = []

    def compile_and_read(program, budget):
        seen.append(program.config.train.remat)
        found = estimate(program, budget)
        too_much = room.available + 1 if len(seen) < 4 else room.available
        needed = dataclasses.replace(found.memory.needed, bytes=too_much)
        memory = dataclasses.replace(found.memory, needed=needed)
        return dataclasses.replace(found, memory=memory)

    monkeypatch.setattr(searching, "compile_and_read", compile_and_read)
    found = search(config, devices, room, compiles=2)
    assert len(found.compiled) == len(seen) == 4  # until one fits
    assert found.given in {one.layout for one in found.compiled}
    assert found.best == found.compiled[0]
    assert found.best.fits
    assert not found.compiled[1].fits
    assert search(config, devices, room, compiles=2) == found
    assert choose(config, devices) == found.best.layout


def test_of_each_way_to_recompute_the_best_is_compiled_first(config, devices, room):
    found = search(config, devices, room)
    queue = [one.layout for one in searching._queue(found.weighed, found.given)]
    assert queue[0] == found.given
    assert {layout.remat for layout in queue[1:4]} == {*map(format_policy, FEW)}
    fitting = [one.layout for one in found.weighed if one.fits]
    assert len(queue) == len(set(queue)) == len({*fitting, found.given})


def test_no_more_are_compiled_when_the_time_is_up(config, devices, room, monkeypatch):
    monkeypatch.setattr(searching, "compile_and_read", OutOfMemory)
    assert search(config, devices, room, compiles=2, minutes=0).compiled == []


@pytest.mark.slow
def test_where_nothing_fits_it_says_so(config, devices, capsys):
    room = MemoryBudget(2**20, 2**20, 2**20)
    found = search(config, devices, room)
    assert found.best is None
    assert found.given is not None
    print_result(found, config)
    printed = capsys.readouterr().out
    assert "none fits" in printed
    least = min(found.weighed, key=lambda one: one.needed)
    own, row = (line for line in printed.splitlines() if line.startswith("no "))
    assert own.endswith(f"{found.given.overrides(config)} (this config's)")
    assert row.endswith(least.layout.overrides(config))
    for size in (least.needed, room.available, least.needed - room.available):
        assert format_bytes(size) in printed.partition("best ")[2]
    assert f"state and batch alone take {format_bytes(least.held)}" in printed
    with pytest.raises(Exit, match="none fits; the least is needed by") as raised:
        choose(config, devices, margin=0.99999)
    assert raised.value.code == DOES_NOT_FIT


@pytest.mark.slow
def test_what_real_devices_have_is_what_there_is(config, devices, monkeypatch):
    little = {"bytes_limit": 2**20}
    device = topology.StandIn
    monkeypatch.setattr(device, "memory_stats", lambda _: little, raising=False)
    with pytest.raises(Exit, match=r"of which there are 1\.00 MiB"):
        choose(config, devices, margin=0.0)


def test_what_helps_depends_on_what_does_not_fit(config, devices):
    """More than the state: shorter rows help."""
    least = search(config, devices, MemoryBudget(2**20, 2**20, 2**20)).closest
    room = MemoryBudget(*[(least.held + least.needed) // 2] * 3)
    said = none_fits(search(config, devices, room), config)
    assert "data.sequence_length" in said
    assert "alone" not in said


@pytest.mark.slow
def test_a_layout_that_cuts_layers_across_slices_is_weighed_if_given(
    composed, two_slices, room
):
    cut = "mesh=fsdp_tensor", "mesh.tensor=2", "mesh.dcn.tensor=2"
    found = search(composed(*MODEL, *cut), two_slices, room)
    assert found.given is not None
    assert (found.given.tensor, found.given.dcn_tensor) == (2, 2)


def test_time_that_was_up_is_not_taken_for_a_lack_of_room(config, devices, room):
    found = search(config, devices, room)
    refused = dataclasses.replace(found.weighed[-1], needed=room.available + 1)
    found = dataclasses.replace(found, compiled=[refused])
    assert found.best is None
    assert "search_minutes" in none_fits(found, config)


def test_where_no_mesh_is_possible_all_that_is_wrong_is_listed(composed, devices, room):
    odd = ("model.num_heads=3", "model.head_dim=64", "data.batch_size=1")
    config = composed(*MODEL, *odd)
    with pytest.raises(ConfigError) as error:
        search(config, devices, room)
    keys = {mistake.key for mistake in error.value.mistakes}
    heads = {"mesh.params.heads", "mesh.params.kv_heads"}
    assert keys == {"data.batch_size", *heads}


def test_the_frontier_trades_speed_for_memory(config, devices, room, capsys):
    found = search(config, devices, room)
    print_result(found, config)
    printed = capsys.readouterr().out
    assert "impossible  3 meshes; the first of them: mesh.params.heads=" in printed
    assert found.given is not None
    assert f"{found.given.overrides(config)} (this config's)" in printed
    lines = [line for line in printed.splitlines() if "yes" in line]
    assert lines
    assert found.best is not None
    assert found.best.layout.overrides(config) in lines[0]
    fitting = [one for one in found.weighed if one.fits]
    for faster, slower in itertools.pairwise(frontier(fitting)):
        assert faster.step_s <= slower.step_s
        assert faster.needed > slower.needed


def test_on_devices_that_nobody_states_all_are_on_fsdp(config):
    layout = choose(config, jax.devices())
    assert (layout.data, layout.fsdp, layout.tensor) == (1, 8, 1)
