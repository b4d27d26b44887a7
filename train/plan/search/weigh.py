"""Weighing layouts by shapes alone (plan/estimated/step.py)."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from train.cli.rules import validate
from train.config import Config
from train.errors import ConfigError, Exit, Mistake, as_typed
from train.hardware.interconnect import num_slices
from train.mesh import Device
from train.plan.budget import MemoryBudget
from train.plan.plan import estimate
from train.plan.precision import combinations
from train.plan.search.candidates import Layout, layouts, variants
from train.plan.search.result import (
    Candidate,
    Excluded,
    Failed,
    as_candidate,
    frontier,
)
from train.program import Program, make_program

_MUCH_SLOWER = 1.5  # what is recomputed, or accumulated, does not make up for that


class Weighed(NamedTuple):
    """What weighing layouts gave.

    candidates: what each layout needs and gives.
    excluded: the meshes that are impossible, by the key that says why.
    errors: what the estimate of the other layouts raised.
    """

    candidates: dict[Layout, Candidate]
    excluded: dict[str, Excluded]
    errors: dict[Layout, Exception]

    @property
    def failed(self) -> dict[str, Failed]:
        """The layouts that could not be estimated, by the name of the error."""
        failed = dict[str, Failed]()
        for layout, error in self.errors.items():
            name = type(error).__name__
            first = failed.get(name, Failed(0, layout, str(error)))
            failed[name] = replace(first, layouts=first.layouts + 1)
        return failed


def weigh_all(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    requested: Layout | None,
    beat: Callable[[], object] = lambda: None,
) -> Weighed:
    """Weigh layouts by shapes. An error in the estimate of one ends that one alone.

    First each mesh is weighed without recomputation, then its other variants. If a mesh
    is much slower than another that fits, only its variant of least memory is weighed.
    `beat` is called for each mesh, twice if it is possible.
    """
    weighed, impossible = dict[Layout, Candidate](), dict[str, list[Mistake]]()
    errors = dict[Layout, Exception]()
    experts = config.model.num_experts if config.model.expert_layers else 0
    length = config.data.sequence_length
    meshes = layouts(len(devices), num_slices(devices), experts, length)
    if requested:
        meshes.insert(0, requested)
    possible = list[tuple[Candidate, Program, list[Layout]]]()

    def weigh(program: Program, layout: Layout) -> Candidate | None:
        if layout not in weighed:
            program = program.with_train_config(layout.applied(config).train)
            candidate = _weigh(program, layout, budget)
            if isinstance(candidate, Exception):
                errors[layout] = candidate
                return None
            weighed[layout] = candidate
        return weighed[layout]

    def first_weighed(program: Program, variants: list[Layout]) -> Candidate | None:
        return next((one for v in variants if (one := weigh(program, v))), None)

    for mesh in _shown(meshes, "weighing meshes", beat):
        try:
            program, variant = _lay_out(config, devices, mesh)
        except ConfigError as error:
            for mistake in error.mistakes:
                impossible.setdefault(mistake.key, []).append(mistake)
            continue
        if mesh is requested:
            weigh(program, mesh)
        elif first := first_weighed(program, variant):
            possible.append((first, program, variant))
    if not weighed and errors:
        raise next(iter(errors.values()))
    if not weighed:
        raise ConfigError([mistakes[0] for mistakes in impossible.values()])
    possible.sort(key=lambda entry: entry[0].step_s)
    for first, program, variant in _shown(possible, "weighing layouts", beat):
        fitting = (one.step_s for one in weighed.values() if one.fits)
        slow = first.step_s > _MUCH_SLOWER * min(fitting, default=math.inf)
        for layout in variant[-1:] if slow else variant:
            if layout not in errors:
                weigh(program, layout)
    excluded = {
        key: Excluded(len(entry), _why(entry[0])) for key, entry in impossible.items()
    }
    return Weighed(weighed, excluded, errors)


def _weigh(
    program: Program, layout: Layout, budget: MemoryBudget
) -> Candidate | Exception:
    """Estimate a layout. An error is returned, except that a config is wrong."""
    try:
        return as_candidate(layout, estimate(program, budget))
    except (ConfigError, Exit):
        raise
    except Exception as error:  # a bug of the estimate, which others may not share
        return error


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
    choices = variants(mesh, rows, config.model, offload, passes)
    if mistakes := [
        rule for one in choices[:1] for rule in validate(one.applied(config))
    ]:
        raise ConfigError(mistakes)
    return program, choices


def weigh_changes(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    plain: Weighed,
) -> Weighed:
    """Add changes of precision on top of the layouts that no other beats in both.

    Also those that did not fit: what changes may make room for them. What a machine
    cannot do, does not go together, or is of unknown speed, is left out.
    """
    weighed, errors = dict(plain.candidates), dict(plain.errors)
    programs = dict[Layout, Program | None]()
    best = [one.layout for one in frontier(plain.candidates.values())]
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
        if program is None:
            continue
        with suppress(ConfigError):
            candidate = _weigh(program.with_train_config(wanted.train), layout, budget)
            if isinstance(candidate, Exception):
                errors[layout] = candidate
            else:
                weighed[layout] = candidate
    return plain._replace(candidates=weighed, errors=errors)


def _shown(
    items: list[Any], title: str, beat: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """Yield the items with a bar of progress in a terminal, and a beat before each."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    for item in track(items, title, console=console, transient=True, disable=hidden):
        beat()
        yield item


def _why(mistake: Mistake) -> str:
    return f"{mistake.key}={as_typed(mistake.value)} {mistake.rule.partition(';')[0]}"
