"""Weigh layouts by estimates from shapes (plan/estimated/step.py)."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from train.cli.rules import config_mistakes
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

_MUCH_SLOWER = 1.5  # No other variant of a mesh makes up for this slow-down.


class Estimates(NamedTuple):
    """The estimates of layouts.

    candidates: the memory and speed of each layout.
    excluded: impossible meshes, by the key of the broken rule.
    errors: the error of each layout that could not be estimated.
    """

    candidates: dict[Layout, Candidate]
    excluded: dict[str, Excluded]
    errors: dict[Layout, Exception]

    @property
    def failed(self) -> dict[str, Failed]:
        """The layouts that could not be estimated, by the name of the error."""
        groups = dict[str, Failed]()
        for layout, error in self.errors.items():
            name = type(error).__name__
            group = groups.get(name, Failed(0, layout, str(error)))
            groups[name] = replace(group, layouts=group.layouts + 1)
        return groups


def weigh_all(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    requested: Layout | None,
    beat: Callable[[], object] = lambda: None,
) -> Estimates:
    """Estimate all layouts. An error in one estimate does not affect other layouts.

    First each mesh is weighed in its variant with the least FLOPs, then in its other
    variants. If that first variant is much slower than a layout that fits, only the
    variant with the least memory follows. `beat` is called once or twice for each mesh.
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

    def weigh_first(program: Program, variants: list[Layout]) -> Candidate | None:
        return next((c for layout in variants if (c := weigh(program, layout))), None)

    for mesh in _track(meshes, "weighing meshes", beat):
        try:
            program, choices = _make_variants(config, devices, mesh)
        except ConfigError as error:
            for mistake in error.mistakes:
                impossible.setdefault(mistake.key, []).append(mistake)
            continue
        if mesh is requested:
            weigh(program, mesh)
        elif candidate := weigh_first(program, choices):
            possible.append((candidate, program, choices))
    if not weighed and errors:
        raise next(iter(errors.values()))
    if not weighed:
        raise ConfigError([mistakes[0] for mistakes in impossible.values()])
    possible.sort(key=lambda entry: entry[0].step_s)
    for candidate, program, choices in _track(possible, "weighing layouts", beat):
        fitting = (c.step_s for c in weighed.values() if c.fits)
        is_slow = candidate.step_s > _MUCH_SLOWER * min(fitting, default=math.inf)
        for layout in choices[-1:] if is_slow else choices:
            if layout not in errors:
                weigh(program, layout)
    excluded = {
        key: Excluded(len(group), _why(group[0])) for key, group in impossible.items()
    }
    return Estimates(weighed, excluded, errors)


def _weigh(
    program: Program, layout: Layout, budget: MemoryBudget
) -> Candidate | Exception:
    """Return the estimate of a layout, or its error unless the config is wrong."""
    try:
        return as_candidate(layout, estimate(program, budget))
    except (ConfigError, Exit):
        raise
    except Exception as error:  # a planner bug, which may not affect other layouts
        return error


def _make_variants(
    config: Config, devices: Sequence[Device], mesh: Layout
) -> tuple[Program, list[Layout]]:
    """Return the program of a mesh, and its variants, the least FLOPs first.

    Raises:
        ConfigError: if the config with this mesh is invalid. The search must check
            this, because training uses the best layout without further checks.
    """
    program, offload = make_program(mesh.applied(config), devices), config.train.offload
    rows, passes = config.data.batch_size, program.pipeline.local_microbatches
    choices = variants(mesh, rows, config.model, offload, passes)
    if mistakes := [
        m for variant in choices[:1] for m in config_mistakes(variant.applied(config))
    ]:
        raise ConfigError(mistakes)
    return program, choices


def weigh_changes(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    plain: Estimates,
) -> Estimates:
    """Add the estimates of precision changes to the layouts on the frontier.

    The frontier includes layouts that do not fit, because a change may save enough
    memory. Combinations that are invalid, unsupported or of unknown speed are skipped.
    """
    weighed, errors = dict(plain.candidates), dict(plain.errors)
    programs = dict[Layout, Program | None]()
    best_layouts = [c.layout for c in frontier(plain.candidates.values())]
    pairs = list(itertools.product(combinations(config), best_layouts))
    for changes, layout in _track(pairs, "weighing changes"):
        layout = replace(layout, changes=changes)
        changed = layout.applied(config)
        if config_mistakes(changed):
            continue
        mesh = replace(layout, remat="full", accumulation_steps=1)
        if mesh not in programs:
            programs[mesh] = None
            with suppress(ConfigError):
                programs[mesh] = make_program(changed, devices)
        program = programs[mesh]
        if program is None:
            continue
        with suppress(ConfigError):
            candidate = _weigh(program.with_train_config(changed.train), layout, budget)
            if isinstance(candidate, Exception):
                errors[layout] = candidate
            else:
                weighed[layout] = candidate
    return plain._replace(candidates=weighed, errors=errors)


def _track(
    items: list[Any], title: str, beat: Callable[[], object] = lambda: None
) -> Iterator[Any]:
    """Yield the items with a progress bar in a terminal; call `beat` before each."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    for item in track(items, title, console=console, transient=True, disable=hidden):
        beat()
        yield item


def _why(mistake: Mistake) -> str:
    return f"{mistake.key}={as_typed(mistake.value)} {mistake.rule.partition(';')[0]}"
