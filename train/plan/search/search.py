"""Search for the fastest layout that fits: mesh, rematerialisation and microbatches.

All layouts are estimated from shapes (plan/estimated/step.py). Then the best layouts
are compiled if the compiler is installed. The config's own layout is estimated and
compiled too.
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
from train.identity import HARMLESS, flatten, is_covered, training_config
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
    """Return the estimated and the compiled layouts of a config, ranked.

    Results are cached by code version, config and devices.

    Args:
        config: the settled config. Its own layout, if it has one, is also searched.
        devices: the devices to plan for, which need not be present.
        budget: a device's memory.
        compiles: compile this many layouts, and more until one fits; 0 compiles none.
        minutes: compile no more layouts after this time.
        precision: also weigh fewer bits and host memory (plan/precision.py).
        beat: called while layouts are weighed, and before each compilation.

    Raises:
        ConfigError: if the rates of the devices are unknown, or no mesh is possible.
    """
    requested = layout_of(config, len(devices))
    file = _cache_file(config, devices, budget, precision)
    if file.exists():
        result = _RESULT.validate_json(file.read_text())
        compiled_layouts = {candidate.layout for candidate in result.compiled}
        if len(compiled_layouts) >= compiles and (
            requested is None or not compiles or requested in compiled_layouts
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
        except Exception as error:  # a planner bug, which may not affect other layouts
            weighed.errors[layout] = error
            continue
        if len(compiled) >= compiles and any(c.fits for c in compiled):
            break
    result = SearchResult(
        weighed=ranked,
        compiled=sorted(compiled, key=rank),
        given=requested if requested in weighed.candidates else None,
        excluded=weighed.excluded,
        seconds=time.monotonic() - start,
        failed=weighed.failed,
    )
    if not result.failed:  # The next search repeats a failed estimate.
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(epath.Path(file), _RESULT.dump_json(result).decode())
    return result


def _queue(ranked: list[Candidate], requested: Layout | None) -> list[Candidate]:
    """Return the candidates to compile: the config's, each policy's best, then others.

    Each policy comes early because estimates compare remat policies less accurately
    than meshes.
    """
    fitting = [c for c in ranked if c.fits]
    best = {c.layout.remat: c for c in reversed(fitting)}.values()
    own_layout = [c for c in ranked if c.layout == requested]
    return list(
        {c.layout: c for c in (*own_layout, *sorted(best, key=rank), *fitting)}.values()
    )


def choose(
    config: Config,
    devices: Sequence[Device],
    margin: float = MARGIN,
    compiles: int = 0,
    minutes: float = math.inf,
    beat: Callable[[], object] = lambda: None,
) -> Layout:
    """Return the best layout for a config with `mesh.planned=true`.

    Cached results of a search that compiled are preferred to new estimates. `beat` is
    called as long as the search makes progress.

    Raises:
        Exit: if no layout fits, with the code DOES_NOT_FIT.
    """
    chip = chip_of(devices[0].device_kind)
    if chip is None or chip.hbm_bandwidth is None:
        log.info("mesh=planned: the rates of these devices are unknown: all on fsdp")
        slices = num_slices(devices)
        return Layout(
            data=slices,
            fsdp=len(devices) // slices,
            tensor=1,
            dcn_data=slices,
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


def _cache_file(
    config: Config, devices: Sequence[Device], budget: MemoryBudget, precision: bool
) -> Path:
    """Return the file that caches the search results of a config.

    The name does not depend on the config's layout or on keys that a plan does not
    use. So training reads the results of `python -m train.plan search=true`.
    """
    layout_keys = *(f"mesh.{axis}" for axis in MESH_AXES), "mesh.dcn", "mesh.planned"
    searched_keys = (*layout_keys, "train.remat", "train.accumulation_steps")
    unused_keys = ("seed", "schedule", "train.num_steps", "optimizer.learning_rate")
    device, slices = devices[0], num_slices(devices)
    machine = device.device_kind, len(devices), slices, budget.available
    ignored, cores = (*HARMLESS, *searched_keys, *unused_keys), "runtime.sparse_cores"
    items = flatten(training_config(config)).items()
    key_values = {k: v for k, v in items if k == cores or not is_covered(k, ignored)}
    identity = [key_values, machine, precision, versions(), code_version()]
    identity = json.dumps(identity, sort_keys=True)
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache_folder() / "plans" / f"{name}.json"
