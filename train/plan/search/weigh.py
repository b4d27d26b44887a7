"""Weigh layouts by estimates from shapes (plan/estimated/step.py)."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import track

from data.errors import Mistake
from train.cli.rules import config_mistakes
from train.config import Config
from train.errors import ConfigError, Exit, as_typed
from train.hardware.interconnect import num_slices
from train.plan.budget import MemoryBudget
from train.plan.plan import Plan, estimate
from train.plan.precision import combinations
from train.plan.recomputing import format_policy, policies_for
from train.plan.search.candidates import Layout, layouts
from train.plan.search.result import Candidate, frontier
from train.resolve.mesh import Device
from train.resolve.mesh_sizes import pipeline_of
from train.resolve.program import ConfiguredProgram, make_program

_MUCH_SLOWER = 1.5  # No other variant of a mesh makes up for this slow-down.


@dataclass
class Weighing:
    """The layouts that one search has weighed so far.

    beat: called before each estimate and each compilation.
    estimates: the estimate of each weighed layout; None if it failed.
    excluded, failed: see `SearchResult`.
    """

    config: Config
    devices: Sequence[Device]
    budget: MemoryBudget
    beat: Callable[[], object]
    programs: dict[Layout, ConfiguredProgram] = field(default_factory=dict)
    estimates: dict[Layout, Candidate | None] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def candidates(self) -> list[Candidate]:
        """The estimates that did not fail."""
        return [c for c in self.estimates.values() if c]

    def plan(
        self,
        layout: Layout,
        make_plan: Callable[[ConfiguredProgram, MemoryBudget], Plan],
    ) -> Candidate | None:
        """Return a layout with the figures of its plan, or None after an error.

        An error is a bug of the planner. It is recorded, and the search continues.
        Raises ConfigError if the layout is impossible.
        """
        self.beat()
        config = layout.applied(self.config)
        if mistakes := config_mistakes(config):
            raise ConfigError(mistakes)
        try:
            key = replace(layout, remat="")  # Remat policies share a program.
            if key not in self.programs:
                self.programs[key] = make_program(config, self.devices)
            program = self.programs[key].with_train_config(config.train)
            return _as_candidate(layout, make_plan(program, self.budget))
        except (ConfigError, Exit):
            raise
        except Exception as error:
            name = type(error).__name__
            overrides = layout.overrides(self.config.mesh)
            self.failed.setdefault(name, f"{overrides}: {name}: {error}")
            return None

    def variants(self, layout: Layout) -> list[Layout]:
        """Return a mesh with each remat policy and each number of microbatches.

        The variant with the least FLOPs comes first, and the one with the least memory
        last. Each microbatch of a device has at least one row, if the batch has enough.
        """
        config = self.config
        shards = layout.data * layout.fsdp * layout.expert * layout.pipeline
        shards *= pipeline_of(
            config.mesh, config.train, layout.pipeline
        ).local_microbatches
        rows = max(1, config.data.batch_size // shards)
        powers_of_two = [2**i for i in range(rows.bit_length())]
        return [
            replace(layout, remat=format_policy(policy), accumulation_steps=n)
            for policy in reversed(policies_for(config.model, config.train))
            for n in powers_of_two
            if rows % n == 0
        ]

    def weigh(self, layout: Layout) -> None:
        """Estimate a layout, unless this has been done."""
        if layout not in self.estimates:
            self.estimates[layout] = self.plan(layout, estimate)

    def weigh_meshes(self, requested: Layout | None) -> None:
        """Weigh the requested layout and all meshes.

        Each mesh is first weighed in its variant with the least FLOPs. If this is much
        slower than a layout that fits, then only the variant with the least memory
        follows, and otherwise all variants.

        Raises ConfigError if no mesh is possible, and RuntimeError if all plans failed.
        """
        config = self.config
        impossible = dict[str, Mistake]()
        experts = config.model.num_experts if config.model.expert_layers else 0
        length = config.data.sequence_length
        slices = num_slices(self.devices)
        meshes = layouts(len(self.devices), slices, experts, length)
        firsts = [self.variants(mesh)[0] for mesh in meshes]
        firsts = [requested, *firsts] if requested else firsts
        for layout in _track(firsts, "weighing meshes"):
            try:
                self.weigh(layout)
            except ConfigError as error:
                impossible = {m.key: m for m in error.mistakes} | impossible
        if not self.candidates and self.failed:
            raise RuntimeError(f"no layout could be planned: {self.failed}")
        if not self.candidates:
            raise ConfigError(list(impossible.values()))
        possible = sorted(self.candidates, key=lambda c: c.step_s)
        for first in _track(possible, "weighing layouts"):
            fitting = (c.step_s for c in self.candidates if c.fits)
            is_slow = first.step_s > _MUCH_SLOWER * min(fitting, default=math.inf)
            choices = self.variants(first.layout)
            for layout in choices[-1:] if is_slow else choices:
                self.weigh(layout)
        for key, mistake in impossible.items():
            self.excluded[key] = f"{key}={as_typed(mistake.value)} {mistake.rule}"

    def weigh_changes(self) -> None:
        """Weigh precision changes to the layouts on the frontier."""
        # They include layouts that do not fit, because a change may save enough memory.
        best_layouts = [c.layout for c in frontier(self.candidates)]
        pairs = list(itertools.product(combinations(self.config), best_layouts))
        for changes, layout in _track(pairs, "weighing changes"):
            with suppress(ConfigError):  # invalid, unsupported or of unknown speed
                self.weigh(replace(layout, changes=changes))


def _as_candidate(layout: Layout, plan: Plan) -> Candidate:
    """Return a candidate; raise ConfigError if the devices' rates are unknown."""
    needed = plan.memory.needed
    prediction = plan.relative_prediction
    if prediction is None:
        rule = f"cannot compare layouts: {plan.missing_prediction}"
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


def _track(items: list[Any], title: str) -> Iterable[Any]:
    """Iterate over the items, with a progress bar in a terminal."""
    return track(items, title, console=Console(stderr=True), transient=True)
