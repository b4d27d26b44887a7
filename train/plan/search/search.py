"""Which layout of a step is the fastest that fits: mesh, recomputation, microbatches.

All ways to lay a step out are weighed by shapes alone (plan/estimated/step.py), then
the best are compiled, where the compiler is installed; the layout that the config has
is weighed and compiled with them.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from etils import epath
from pydantic import TypeAdapter

from data.machine import cache_folder
from data.storage import write_atomically
from train.config import MESH_AXES, Config
from train.errors import DOES_NOT_FIT, ConfigError, Exit
from train.hardware.chips import chip_of
from train.hardware.interconnect import num_slices
from train.identity import HARMLESS, covered, flatten, of_training
from train.mesh import Device
from train.plan.budget import MemoryBudget, memory_budget, memory_limit
from train.plan.config import MARGIN
from train.plan.plan import compile_and_read
from train.plan.recomputing import format_policy
from train.plan.search.candidates import Layout, layout_of
from train.plan.search.result import (
    Candidate,
    SearchResult,
    as_candidate,
    failures,
    none_fits,
    rank,
)
from train.plan.search.weigh import weigh_all, weigh_changes
from train.program import make_program
from train.run.versions import code_version, versions

log = logging.getLogger(__name__)
_RESULT = TypeAdapter(SearchResult)


def search(
    config: Config,
    devices: Sequence[Device],
    budget: MemoryBudget,
    compiles: int = 0,
    minutes: float = math.inf,
    precision: bool = False,
    beat: Callable[[], object] = lambda: None,
) -> SearchResult:
    """Search for the fastest layout that fits.

    Results of the same code for the same config and devices are cached.

    Args:
        config: the settled config. Its own mesh, recomputation and microbatches are one
            of the layouts.
        devices: the devices to plan for, which need not be present.
        budget: a device's memory.
        compiles: compile at least this many, until one fits. 0 compiles none.
        minutes: compile no more after this time.
        precision: also weigh fewer bits and host memory (plan/precision.py).
        beat: called while layouts are weighed, and before each compilation.

    Raises:
        ConfigError: the rates of the devices are unknown, or no mesh is possible.
    """
    requested = layout_of(config, len(devices))
    file = _cached(config, devices, budget, precision)
    if file.exists():
        result = _RESULT.validate_json(file.read_text())
        done = {one.layout for one in result.compiled}
        if len(done) >= compiles and (
            requested is None or not compiles or requested in done
        ):
            return replace(result, given=requested)
    start = time.monotonic()
    weighed = weigh_all(config, devices, budget, requested, beat)
    if precision:
        weighed = weigh_changes(config, devices, budget, weighed)
    ranked = sorted(weighed.candidates.values(), key=rank)
    queue = _queue(ranked, requested)
    compiled = list[Candidate]()
    while queue and compiles and time.monotonic() < start + 60 * minutes:
        beat()
        layout = queue.pop(0).layout
        program = make_program(layout.applied(config), devices)
        try:
            compiled.append(as_candidate(layout, compile_and_read(program, budget)))
        except (ConfigError, Exit):
            raise
        except Exception as error:  # a bug of the plan, which others may not share
            weighed.errors[layout] = error
            continue
        if len(compiled) >= compiles and any(one.fits for one in compiled):
            break
    result = SearchResult(
        weighed=ranked,
        compiled=sorted(compiled, key=rank),
        given=requested if requested in weighed.candidates else None,
        excluded=weighed.excluded,
        seconds=time.monotonic() - start,
        failed=weighed.failed,
    )
    if not result.failed:  # a failed estimate may succeed another time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(epath.Path(file), _RESULT.dump_json(result).decode())
    return result


def _queue(ranked: list[Candidate], requested: Layout | None) -> list[Candidate]:
    """Order what to compile: the given one, the best of each remat policy, the rest.

    Estimates compare meshes better than they compare what is recomputed.
    """
    fitting = [one for one in ranked if one.fits]
    best = {one.layout.remat: one for one in reversed(fitting)}.values()
    first = [one for one in ranked if one.layout == requested]
    return list(
        {
            one.layout: one for one in (*first, *sorted(best, key=rank), *fitting)
        }.values()
    )


def choose(
    config: Config,
    devices: Sequence[Device],
    margin: float = MARGIN,
    compiles: int = 0,
    minutes: float = math.inf,
    beat: Callable[[], object] = lambda: None,
) -> Layout:
    """Settle the layout of a config that leaves it to a search.

    What was compiled before for such devices wins over what is estimated now. `beat` is
    called as long as the search makes progress.

    Raises:
        Exit: DOES_NOT_FIT, if nothing does.
    """
    chip = chip_of(devices[0].device_kind)
    if chip is None or chip.hbm_bandwidth is None:
        log.info("mesh=planned: the rates of these devices are unknown: all on fsdp")
        parts = num_slices(devices)
        return Layout(
            data=parts,
            fsdp=len(devices) // parts,
            tensor=1,
            dcn_data=parts,
            dcn_fsdp=1,
            remat=format_policy(config.train.remat),
            accumulation_steps=config.train.accumulation_steps,
        )
    budget = memory_budget(chip, margin, limit=memory_limit(devices[0]))
    result = search(config, devices, budget, compiles, minutes, beat=beat)
    for sentence in failures(result.failed, config):
        log.warning("mesh=planned: %s", sentence)
    if result.best is None:
        raise Exit(DOES_NOT_FIT, f"mesh=planned: {none_fits(result, config)}")
    best = result.best
    log.info("mesh=planned: %s (%s)", best.layout.overrides(config), best.how)
    return best.layout


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
    ignored, cores = (*HARMLESS, *searched, *idle), "runtime.sparse_cores"
    keys = flatten(of_training(config)).items()
    key_values = {k: v for k, v in keys if k == cores or not covered(k, ignored)}
    about = [key_values, kind, precision, versions(), code_version()]
    about = json.dumps(about, sort_keys=True)
    digits = hashlib.sha256(about.encode()).hexdigest()[:16]
    return cache_folder() / "plans" / f"{digits}.json"
