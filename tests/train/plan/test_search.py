"""The fastest layout that fits, on stand-ins: nothing is compiled."""

import dataclasses
import itertools

import jax
import pytest

from train.errors import DOES_NOT_FIT, ConfigError, Exit
from train.hardware import devices as topology
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan import precision, recomputing
from train.plan import search as searching
from train.plan.aot import OutOfMemory
from train.plan.candidates import Layout
from train.plan.config import PlanConfig
from train.plan.memory import MemoryBudget, memory_budget
from train.plan.plan import Plan, estimate
from train.plan.precision import CHANGES, changed, combinations
from train.plan.recomputing import WAYS, typed
from train.plan.search import choose, search
from train.plan.search_result import (
    frontier,
    none_fits,
    print_result,
)
from train.program import make_program
from train.units import format_bytes

MODEL = (
    *("model=gpt2_124m", "model.vocab_size=50304", "mesh=ddp"),
    *("data.batch_size=64", "data.sequence_length=1024"),
)


@pytest.fixture
def devices(monkeypatch, tmp_path):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return fake_devices(parse_target("v5e-16"))


PLANS: dict[tuple, Plan] = {}
FEW = WAYS[0], WAYS[2], WAYS[-1]


@pytest.fixture(autouse=True)
def estimated_once(monkeypatch):
    """Estimate each program once, of three policies; none depends on the room."""
    monkeypatch.setattr(recomputing, "WAYS", FEW)

    def once(program, budget=None):
        mesh = program.mesh
        key = repr(program.config), program.how, mesh.devices.flat[0].device_kind
        if (key, mesh.size) not in PLANS:
            PLANS[key, mesh.size] = estimate(program)
        plan = PLANS[key, mesh.size]
        return dataclasses.replace(plan, budget=budget or plan.budget)

    monkeypatch.setattr(searching, "estimate", once)


@pytest.fixture
def room():
    return memory_budget(parse_target("v5e-16").chip, 0.05)


@pytest.fixture
def config(composed):
    return composed(*MODEL)


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


def test_what_was_found_is_not_looked_for_again(config, devices, room, monkeypatch):
    found = search(config, devices, room)
    monkeypatch.delattr(searching, "_weigh_all")
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
    assert {layout.remat for layout in queue[1:4]} == {*map(typed, FEW)}
    fitting = [one.layout for one in found.weighed if one.fits]
    assert len(queue) == len(set(queue)) == len({*fitting, found.given})


def test_no_more_are_compiled_when_the_time_is_up(config, devices, room, monkeypatch):
    monkeypatch.setattr(searching, "compile_and_read", OutOfMemory)
    assert search(config, devices, room, compiles=2, minutes=0).compiled == []


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


STAGES = Layout(1, 4, 1, 1, 1, "none", 1, pipeline=2, dcn_pipeline=2)
COPIES = Layout(2, 4, 1, 2, 1, "none", 1)


@pytest.fixture
def two_slices(devices, monkeypatch):
    """Two slices, on which copies and stages are weighed; one way to recompute."""
    monkeypatch.setattr(recomputing, "WAYS", WAYS[:1])
    monkeypatch.setattr(searching, "layouts", lambda *_: [STAGES, COPIES])
    return fake_devices(parse_target("v5e-4x2"))


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
    monkeypatch.setattr(recomputing, "WAYS", WAYS[:1])
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
    assert found.runner_up.layout.of_layers != found.best.layout.of_layers
    assert "% time a step" in cost


@pytest.mark.slow
def test_changes_of_precision_are_weighed_when_asked_for(
    composed, devices, monkeypatch, capsys
):
    """On each layout that none beats; what the chip cannot do is left out."""
    some = "optimizer.moment_dtype=int8", "model.compute_dtype=float8"
    some += ("optimizer.offload=true",)
    monkeypatch.setattr(precision, "CHANGES", {name: CHANGES[name] for name in some})
    monkeypatch.setattr(recomputing, "WAYS", WAYS[:1])
    monkeypatch.setattr(searching, "layouts", lambda *_: [])
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
    monkeypatch.setattr(searching, "layouts", lambda *_: [])
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
        assert changed(config, changes) == composed(*MODEL, "optimizer=adamw", *changes)
    settled = composed(*MODEL, "optimizer.moment_dtype=bfloat16")
    assert not any(
        "moment_dtype" in c for changes in combinations(settled) for c in changes
    )


def test_on_devices_that_nobody_states_all_are_on_fsdp(config):
    layout = choose(config, jax.devices())
    assert (layout.data, layout.fsdp, layout.tensor) == (1, 8, 1)
