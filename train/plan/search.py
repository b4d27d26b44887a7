"""Which layout of a step is the fastest that fits: mesh, recomputation, microbatches.

All ways to lay a step out are weighed by shapes alone (plan/estimated/step.py), then
the best are compiled, where the compiler is installed; the layout that the config has
is weighed and compiled with them.
"""

import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from etils import epath
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import track

from data.machine import cache_folder
from train.cli.rules import validate
from train.config import MESH_AXES, Config
from train.errors import DOES_NOT_FIT, ConfigError, Exit, Mistake, as_typed
from train.hardware.chips import chip_of
from train.hardware.interconnect import num_slices
from train.identity import HARMLESS, covered, flatten, of_training
from train.mesh import Device
from train.plan.candidates import Layout, layout_of, layouts, variants
from train.plan.config import MARGIN
from train.plan.memory import MemoryBudget, memory_budget, memory_limit
from train.plan.plan import Plan, compile_and_read, estimate
from train.plan.precision import combinations
from train.plan.recomputing import typed
from train.plan.search_result import (
    Candidate,
    Excluded,
    SearchResult,
    frontier,
    none_fits,
)
from train.program import Program, make_program
from train.run.storage import write_whole
from train.run.versions import code_version, versions

log = logging.getLogger(__name__)
_RESULT = TypeAdapter(SearchResult)
_MUCH_SLOWER = 1.5  # what is recomputed, or accumulated, does not make up for that


def search(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    compiles: int = 0,
    minutes: float = math.inf,
    precision: bool = False,
) -> SearchResult:
    """Look for the fastest layout that fits.

    What was found before, by the same code for the same config and devices, is kept in
    the cache.

    Args:
        config: settled; what it says of mesh, recomputation and microbatches is one of
            the layouts.
        devices: to lay the step out on, which need not be there.
        budget: a device's memory.
        compiles: how many to compile at least, until one fits; 0: none.
        minutes: after which no more are compiled.
        precision: weigh fewer bits and host memory too (plan/precision.py).

    Raises:
        ConfigError: if nobody states how fast the devices are, or no mesh is possible.
    """
    given = layout_of(config, len(devices))
    file = _cached(config, devices, budget, precision)
    if file.exists():
        result = _RESULT.validate_json(file.read_text())
        done = {one.layout for one in result.compiled}
        if len(done) >= compiles and (given is None or not compiles or given in done):
            return replace(result, given=given)
    start = time.monotonic()
    weighed, excluded = _weigh_all(config, devices, budget, given)
    if precision:
        weighed |= _weigh_changes(config, devices, budget, weighed)
    ranked = sorted(weighed.values(), key=_rank)
    queue = _queue(ranked, given)
    compiled = list[Candidate]()
    while queue and compiles and time.monotonic() < start + 60 * minutes:
        layout = queue.pop(0).layout
        program = make_program(layout.applied(config), devices)
        compiled.append(_weighed(layout, compile_and_read(program, budget)))
        if len(compiled) >= compiles and any(one.fits for one in compiled):
            break
    result = SearchResult(
        weighed=ranked,
        compiled=sorted(compiled, key=_rank),
        given=given if given in weighed else None,
        excluded=excluded,
        seconds=time.monotonic() - start,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(epath.Path(file), _RESULT.dump_json(result).decode())
    return result


def _queue(ranked: list[Candidate], given: Layout | None) -> list[Candidate]:
    """Order what to compile: the given one, the best of each remat policy, the rest.

    Estimates compare meshes better than they compare what is recomputed.
    """
    fitting = [one for one in ranked if one.fits]
    best = {one.layout.remat: one for one in reversed(fitting)}.values()
    first = [one for one in ranked if one.layout == given]
    return list(
        {
            one.layout: one for one in (*first, *sorted(best, key=_rank), *fitting)
        }.values()
    )


def choose(
    config: Config,
    devices: Sequence[Device],
    margin: float = MARGIN,
    compiles: int = 0,
    minutes: float = math.inf,
) -> Layout:
    """Settle the layout of a config that leaves it to a search.

    What was compiled before for such devices wins over what is estimated now.

    Raises:
        Exit: DOES_NOT_FIT, if nothing does.
    """
    chip = chip_of(devices[0].device_kind)
    if chip is None or chip.hbm_bandwidth is None:
        log.info("mesh=planned: nobody says how fast these devices are: all on fsdp")
        parts = num_slices(devices)
        train = typed(config.train.remat), config.train.accumulation_steps
        return Layout(parts, len(devices) // parts, 1, parts, 1, *train)
    budget = memory_budget(chip, margin, limit=memory_limit(devices[0]))
    result = search(config, devices, budget, compiles, minutes)
    if result.best is None:
        raise Exit(DOES_NOT_FIT, f"mesh=planned: {none_fits(result, config)}")
    best = result.best
    log.info("mesh=planned: %s (%s)", best.layout.overrides(config), best.how)
    return best.layout


def _weigh_all(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    given: Layout | None,
) -> tuple[dict[Layout, Candidate], dict[str, Excluded]]:
    """Weigh layouts by shapes; count the meshes that are impossible by key.

    First each mesh without recomputation. Of those that are much slower so than
    another that fits only what needs the least memory is weighed besides.
    """
    weighed, wrong = dict[Layout, Candidate](), dict[str, list[Mistake]]()
    experts = config.model.num_experts if config.model.expert_layers else 0
    length = config.data.sequence_length
    meshes = layouts(len(devices), num_slices(devices), experts, length)
    if given:
        meshes.insert(0, given)
    possible = list[tuple[Candidate, Program, list[Layout]]]()

    def weigh(program: Program, layout: Layout) -> Candidate:
        plan = estimate(program.trained(layout.applied(config).train), budget)
        return weighed.setdefault(layout, _weighed(layout, plan))

    for mesh in _shown(meshes, "weighing meshes"):
        try:
            program, own = _lay_out(config, devices, mesh)
        except ConfigError as error:
            for mistake in error.mistakes:
                wrong.setdefault(mistake.key, []).append(mistake)
            continue
        if mesh is given:
            weigh(program, mesh)
        elif own:
            possible.append((weigh(program, own[0]), program, own))
    if not weighed:
        raise ConfigError([mistakes[0] for mistakes in wrong.values()])
    possible.sort(key=lambda of: of[0].step_s)
    for first, program, own in _shown(possible, "weighing layouts"):
        fitting = (one.step_s for one in weighed.values() if one.fits)
        slow = first.step_s > _MUCH_SLOWER * min(fitting, default=math.inf)
        for layout in own[-1:] if slow else own[1:]:
            weigh(program, layout)
    excluded = {key: Excluded(len(of), _why(of[0])) for key, of in wrong.items()}
    return weighed, excluded


def _lay_out(
    config: Config, devices: Sequence[Device], mesh: Layout
) -> tuple[Program, list[Layout]]:
    """Lay out a mesh, and list its variants, first what computes the least.

    Raises:
        ConfigError: if it does not fit the devices, or would be refused if it was
            typed: training takes the best without asking once more.
    """
    program, offload = make_program(mesh.applied(config), devices), config.train.offload
    rows, passes = config.data.batch_size, program.pipeline.own
    own = variants(mesh, rows, config.model, offload, passes)
    if mistakes := [rule for one in own[:1] for rule in validate(one.applied(config))]:
        raise ConfigError(mistakes)
    return program, own


def _weigh_changes(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    plain: dict[Layout, Candidate],
) -> dict[Layout, Candidate]:
    """Weigh changes of precision on top of the layouts that no other beats in both.

    Also those that did not fit: what changes may make room for them. What a machine
    cannot do, does not go together, or is of unknown speed, is left out.
    """
    weighed, programs = dict[Layout, Candidate](), dict[Layout, Program | None]()
    best = [one.layout for one in frontier(plain.values())]
    pairs = list(itertools.product(combinations(config), best))
    for changes, layout in _shown(pairs, "weighing changes"):
        layout = replace(layout, changes=changes)
        wanted = layout.applied(config)
        if validate(wanted):
            continue
        mesh = replace(layout, remat="full", accumulation_steps=1)
        if mesh not in programs:
            programs[mesh] = None
            with suppress(ConfigError):
                programs[mesh] = make_program(wanted, devices)
        program = programs[mesh]
        if program is not None:
            plan = estimate(program.trained(wanted.train), budget)
            if plan.prediction is not None:
                weighed[layout] = _weighed(layout, plan)
    return weighed


def _shown(items: list[Any], what: str) -> Iterable[Any]:
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(items, what, console=console, transient=True, disable=hidden)


def _why(mistake: Mistake) -> str:
    return f"{mistake.key}={as_typed(mistake.value)} {mistake.rule.partition(';')[0]}"


def _rank(one: Candidate) -> tuple[bool, float, int]:
    return not one.fits, one.step_s if one.fits else one.needed, one.needed


def _weighed(layout: Layout, plan: Plan) -> Candidate:
    needed, prediction = plan.memory.needed, plan.prediction
    if prediction is None:
        rule = f"cannot compare layouts: {plan.unpredicted}"
        raise ConfigError([Mistake("search", True, rule)])
    middle = prediction.middle
    return Candidate(
        layout=layout,
        needed=needed.bytes,
        held=plan.memory.held,
        available=plan.budget.available,
        step_s=middle.step_s,
        tokens_per_second=middle.tokens_per_second,
        mfu=middle.mfu,
        how=needed.how,
    )


def _cached(
    config: Config, devices: Sequence[Device], budget: MemoryBudget, precision: bool
) -> Path:
    """Name the file of what was found for a config, whatever its own layout.

    Training finds there what the plan of the same config found.
    """
    layout = *(f"mesh.{axis}" for axis in MESH_AXES), "mesh.dcn", "mesh.planned"
    searched = (*layout, "train.remat", "train.accumulation_steps")
    idle = ("seed", "schedule", "train.num_steps", "optimizer.learning_rate")
    kind = devices[0].device_kind, len(devices), num_slices(devices), budget.available
    left, cores = (*HARMLESS, *searched, *idle), "runtime.sparse_cores"
    keys = flatten(of_training(config)).items()
    same = {k: v for k, v in keys if k == cores or not covered(k, left)}
    about = [same, kind, precision, versions(), code_version()]
    about = json.dumps(about, sort_keys=True)
    digits = hashlib.sha256(about.encode()).hexdigest()[:16]
    return cache_folder() / "plans" / f"{digits}.json"
