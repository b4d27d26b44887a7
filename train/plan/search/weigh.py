"""Weighing layouts by shapes alone (plan/estimated/step.py)."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import track

from train.cli.rules import validate
from train.config import Config
from train.errors import ConfigError, Mistake, as_typed
from train.hardware.interconnect import num_slices
from train.mesh import Device
from train.plan.budget import MemoryBudget
from train.plan.plan import estimate
from train.plan.precision import combinations
from train.plan.search.candidates import Layout, layouts, variants
from train.plan.search.result import Candidate, Excluded, as_candidate, frontier
from train.program import Program, make_program

_MUCH_SLOWER = 1.5  # what is recomputed, or accumulated, does not make up for that


def weigh_all(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    given: Layout | None,
    beat: Callable[[], object] = lambda: None,
) -> tuple[dict[Layout, Candidate], dict[str, Excluded]]:
    """Weigh layouts by shapes; count the meshes that are impossible by key.

    First each mesh without recomputation. Of those that are much slower so than
    another that fits only what needs the least memory is weighed besides. `beat` is
    called for each mesh, twice if it is possible.
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
        return weighed.setdefault(layout, as_candidate(layout, plan))

    for mesh in _shown(meshes, "weighing meshes", beat):
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
    for first, program, own in _shown(possible, "weighing layouts", beat):
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


def weigh_changes(
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
                weighed[layout] = as_candidate(layout, plan)
    return weighed


def _shown(
    items: list[Any], what: str, beat: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """Yield the items with a bar of progress in a terminal, and a beat before each."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    for item in track(items, what, console=console, transient=True, disable=hidden):
        beat()
        yield item


def _why(mistake: Mistake) -> str:
    return f"{mistake.key}={as_typed(mistake.value)} {mistake.rule.partition(';')[0]}"
