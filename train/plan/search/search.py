"""Search for the fastest layout that fits: mesh, rematerialisation and microbatches.

All layouts are estimated from shapes (plan/estimated/step.py), which gives their speed
and a lower bound of memory. If the compiler is installed, it compiles small copies of
the best layouts, and then the best one whole.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from etils import epath
from pydantic import TypeAdapter

from data.machine import cache_folder
from data.storage import write_atomically
from train.config import Config
from train.distributed.processes import Cluster
from train.errors import DOES_NOT_FIT, Exit
from train.hardware.chips import chip_of
from train.hardware.interconnect import num_slices
from train.identity import HARMLESS, flatten, is_covered
from train.plan.budget import MemoryBudget, budget_of
from train.plan.cost import COMPILED
from train.plan.plan import compile_and_read, compile_small
from train.plan.recomputing import format_policy
from train.plan.search.candidates import Layout, layout_of
from train.plan.search.result import Candidate, SearchResult, none_fits, rank
from train.plan.search.weigh import Weighing
from train.resolve.mesh import Device
from train.run.versions import code_version, versions

log = logging.getLogger(__name__)
_RESULT = TypeAdapter(SearchResult)
# A lower bound of memory omits the buffers inside a layer and of the loss. So training
# takes a layout that was not compiled only if it leaves this fraction of the memory.
_UNCOMPILED_MARGIN = 0.15


@dataclass(frozen=True)
class Search:
    """A search for the fastest layout of a config that fits some devices.

    precision: whether the changes of plan/precision.py are weighed too.
    beat: called before each plan.
    """

    config: Config
    devices: Sequence[Device]
    budget: MemoryBudget
    precision: bool = False
    beat: Callable[[], object] = lambda: None

    def run(self, compiles: int = 0, minutes: float = math.inf) -> SearchResult:
        """Return the estimated and the compiled layouts of the config, ranked.

        The config's own layout, if it has one, is also searched. At least `compiles`
        layouts are compiled, and more until one fits, but none if `compiles` is 0 or
        after `minutes`. Results are cached.

        Raises ConfigError if the rates of the devices are unknown, or no mesh is
        possible.
        """
        config = self.config
        num_devices = len(self.devices)
        requested = layout_of(config.mesh, config.train, num_devices=num_devices)
        file = self._cache_file
        if file.exists():
            result = _RESULT.validate_json(file.read_text())
            searched = {c.layout for c in result.weighed if not (compiles and c.fits)}
            searched |= {c.layout for c in result.compiled} | {None}
            if len(result.compiled) >= compiles and requested in searched:
                return replace(result, given=requested)
        start = time.monotonic()
        weighing = Weighing(config, self.devices, self.budget, self.beat)
        weighing.weigh_meshes(requested)
        if self.precision:
            weighing.weigh_changes()
        compiled = _compile(weighing, requested, compiles, start + 60 * minutes)
        result = SearchResult(
            weighed=sorted(weighing.candidates, key=rank),
            compiled=compiled,
            given=requested if requested in weighing.estimates else None,
            excluded=weighing.excluded,
            seconds=time.monotonic() - start,
            failed=weighing.failed,
        )
        if not result.failed:  # The next search repeats a failed estimate.
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(epath.Path(file), _RESULT.dump_json(result).decode())
        return result

    def choose(self, compiles: int = 0, minutes: float = math.inf) -> Layout:
        """Return the best layout for a config with `mesh.planned=true`.

        Cached results of a search that compiled are preferred. If nothing was compiled,
        the best layout is the fastest that leaves `_UNCOMPILED_MARGIN`, if there is
        one, and otherwise the one that leaves most memory. See `run` for the arguments.
        Raises Exit with the code DOES_NOT_FIT if no layout fits.
        """
        devices = self.devices
        mesh = self.config.mesh
        train = self.config.train
        chip = chip_of(devices[0].device_kind)
        if chip is None or chip.hbm_bandwidth is None:
            log.info(
                "mesh=planned: the rates of these devices are unknown: all on fsdp"
            )
            slices = num_slices(devices)
            return Layout(
                data=slices,
                fsdp=len(devices) // slices,
                dcn_data=slices,
                remat=format_policy(train.remat),
                accumulation_steps=train.accumulation_steps,
            )
        result = self.run(compiles, minutes)
        for error in result.failed.values():
            log.warning("mesh=planned: a bug of train.plan: %s", error)
        best = result.best
        if best is None:
            raise Exit(DOES_NOT_FIT, f"mesh=planned: {none_fits(result, mesh)}")
        if not result.compiled:
            margin = int(_UNCOMPILED_MARGIN * self.budget.total)
            limit = self.budget.available - margin
            safe = (c for c in result.weighed if c.needed <= limit)
            best = next(safe, min(result.weighed, key=lambda c: c.needed))
        log.info("mesh=planned: %s (%s)", best.layout.overrides(mesh), best.how)
        return best.layout

    @property
    def _cache_file(self) -> Path:
        """The file that caches the results.

        The name does not depend on the config's layout or on keys that a plan does not
        use. So training reads the results of `python -m train.plan search=true`.
        """
        devices = self.devices
        kind = devices[0].device_kind
        cores = "runtime.sparse_cores"
        machine = kind, len(devices), num_slices(devices), self.budget.available
        unused_keys = ("seed", "schedule", "train.num_steps", "optimizer.learning_rate")
        items = flatten(Layout().applied(self.config).plain()).items()
        ignored = (*HARMLESS, *unused_keys)
        key_values = {
            k: v for k, v in items if k == cores or not is_covered(k, ignored)
        }
        identity = [key_values, machine, self.precision, versions(), code_version()]
        identity = json.dumps(identity, sort_keys=True)
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return cache_folder() / "plans" / f"{name}.json"


def _compile(
    weighing: Weighing, requested: Layout | None, compiles: int, deadline: float
) -> list[Candidate]:
    """Compile small copies of finalists, then the best one whole; return them ranked.

    The config's own layout comes first, then each policy's best, because estimates of
    policies are less accurate than those of meshes. A finalist is left for last if its
    estimate and the least gap so far between compiler and estimate do not fit.
    """
    fitting = sorted((c for c in weighing.candidates if c.fits), key=rank)
    best_of = {c.layout.remat: c for c in reversed(fitting)}.values()
    queue = sorted(fitting, key=lambda c: (c.layout != requested, c not in best_of))
    estimated = {c.layout: c.needed for c in queue}
    compiled = list[Candidate]()
    while compiles and time.monotonic() < deadline:
        best = compiled[0] if compiled and compiled[0].fits else None
        if queue and (best is None or len(compiled) < compiles):
            gap = min((c.needed - estimated[c.layout] for c in compiled), default=0)
            likely = (c for c in queue if c.needed + gap <= c.available)
            finalist = next(likely, queue[0])
            make_plan = compile_small
            queue.remove(finalist)
        elif best and best.how != COMPILED:
            finalist = compiled.pop(0)
            make_plan = compile_and_read
        else:
            break
        if candidate := weighing.plan(finalist.layout, make_plan):
            compiled = sorted([*compiled, candidate], key=rank)
    return compiled


def with_best_layout(
    config: Config, cluster: Cluster, beat: Callable[[], object]
) -> Config:
    """Return a config with the layout that process 0 chooses for all devices.

    `beat` is called on all processes during the search. Raises Exit as `choose` does.
    """

    def choose(beat: Callable[[], object]) -> dict[str, Any]:
        devices = jax.devices()
        search = Search(config, devices, budget_of(devices), beat=beat)
        return asdict(search.choose())

    layout = cluster.broadcast_progress(choose, beat)
    return Layout(**layout).applied(config)
