"""Which layout of a step is the fastest that fits: mesh, recomputation, microbatches.

All ways to lay a step out are weighed by shapes alone (train/estimate.py), then the
best are compiled, where the compiler is installed; the layout that the config has is
weighed and compiled with them.
"""

import dataclasses
import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etils import epath
from rich.console import Console
from rich.progress import track

from train.chips import chip_of
from train.config import Config, ConfigError, Mistake, PlanConfig
from train.exits import DOES_NOT_FIT, Exit
from train.identity import HARMLESS, covered, flatten
from train.layouts import Layout, layout_of, layouts, variants
from train.ledger import Room, room_of
from train.mesh import Device
from train.object_store import write_whole
from train.outlook import Outlook, compile_and_read, estimate
from train.program import Program, make_program
from train.progress import format_bytes, format_count, print_table
from train.runtime import cache_dir
from train.scaling import num_slices
from train.versions import code_version, versions

log = logging.getLogger(__name__)

_SHOWN = 10


@dataclass(frozen=True)
class Weighed:
    """What a layout needs and gives; bytes are of one device.

    step_s, tokens_per_second, mfu: the middle of the prediction (train/roofline.py).
    how: compiled or estimated.
    """

    layout: Layout
    needed: int
    available: int
    step_s: float
    tokens_per_second: float
    mfu: float
    how: str

    @property
    def fits(self) -> bool:
        """Whether a device's memory suffices."""
        return self.needed <= self.available

    @property
    def spare(self) -> int:
        """Bytes that are left of a device's memory."""
        return self.available - self.needed


@dataclass(frozen=True)
class Found:
    """What a search came to.

    weighed: all layouts by shapes, the fastest that fits first.
    compiled: those that were compiled, likewise.
    given: the layout of the config itself, if it is possible.
    excluded: how many were impossible, by the key that says why.
    """

    weighed: list[Weighed]
    compiled: list[Weighed]
    given: Layout | None
    excluded: dict[str, int]
    seconds: float

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Found":
        """Read what `dataclasses.asdict` gave."""

        def weighed(one: dict[str, Any]) -> Weighed:
            return Weighed(**{**one, "layout": Layout(**one["layout"])})

        return cls(
            weighed=[weighed(one) for one in found["weighed"]],
            compiled=[weighed(one) for one in found["compiled"]],
            given=found["given"] and Layout(**found["given"]),
            excluded=found["excluded"],
            seconds=found["seconds"],
        )

    @property
    def best(self) -> Weighed | None:
        """The fastest that fits, compiled if any was; None: nothing fits."""
        known = self.compiled or self.weighed
        return known[0] if known and known[0].fits else None


def search(
    config: Config,
    devices: Sequence[Device],
    room: Room,
    compiles: int = 0,
    minutes: float = math.inf,
) -> Found:
    """Look for the fastest layout that fits.

    What was found before, by the same code for the same config and devices, is kept in
    the cache.

    Args:
        config: settled; what it says of mesh, recomputation and microbatches is one of
            the layouts.
        devices: to lay the step out on, which need not be there.
        room: a device's memory.
        compiles: how many to compile at least, until one fits; 0: none.
        minutes: after which no more are compiled.

    Raises:
        ConfigError: if nobody states how fast the devices are.
    """
    given, file = layout_of(config, len(devices)), _cached(config, devices, room)
    if file.exists():
        found = Found.from_json(json.loads(file.read_text()))
        done = {one.layout for one in found.compiled}
        if len(done) >= compiles and (given is None or not compiles or given in done):
            return replace(found, given=given)
    start = time.monotonic()
    weighed, excluded = _weigh_all(config, devices, room, given)
    ranked = sorted(weighed.values(), key=_rank)
    queue = _queue(ranked, given)
    compiled = list[Weighed]()
    while queue and compiles and time.monotonic() < start + 60 * minutes:
        layout = queue.pop(0).layout
        program = make_program(layout.applied(config), devices)
        compiled.append(_weighed(layout, compile_and_read(program), room))
        if len(compiled) >= compiles and any(one.fits for one in compiled):
            break
    found = Found(
        weighed=ranked,
        compiled=sorted(compiled, key=_rank),
        given=given if given in weighed else None,
        excluded=dict(excluded),
        seconds=time.monotonic() - start,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(epath.Path(file), json.dumps(dataclasses.asdict(found)))
    return found


def _queue(ranked: list[Weighed], given: Layout | None) -> list[Weighed]:
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
    margin: float = PlanConfig.margin,
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
        train = config.train.remat.value, config.train.accumulation_steps
        return Layout(parts, len(devices) // parts, 1, parts, 1, *train)
    room = room_of(chip, margin)
    best = search(config, devices, room, compiles, minutes).best
    if best is None:
        raise Exit(
            DOES_NOT_FIT,
            f"mesh=planned: no layout fits into {format_bytes(room.available)} a "
            "device; take more of them, or shorter rows (data.sequence_length)",
        )
    log.info("mesh=planned: %s (%s)", best.layout.overrides, best.how)
    return best.layout


def _weigh_all(
    config: Config, devices: Sequence[Device], room: Room, given: Layout | None
) -> tuple[dict[Layout, Weighed], Counter[str]]:
    """Weigh all layouts by shapes; count those that are impossible by key."""
    weighed, excluded = dict[Layout, Weighed](), Counter[str]()
    meshes = layouts(len(devices), num_slices(devices))
    if given:
        meshes.insert(0, given)
    console = Console(stderr=True)
    for mesh in track(
        meshes,
        "weighing layouts",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        try:
            program = make_program(mesh.applied(config), devices)
        except ConfigError as error:
            excluded.update({mistake.key for mistake in error.mistakes})
            continue
        own = [mesh] if mesh is given else variants(mesh, config.data.batch_size)
        for layout in own:
            outlook = estimate(_variant(program, layout))
            weighed[layout] = _weighed(layout, outlook, room)
    return weighed, excluded


def print_found(found: Found) -> None:
    """Print the frontier: each layout that no other beats in both speed and memory."""
    excluded = ", ".join(f"{key} {n}" for key, n in found.excluded.items())
    print(
        f"searched    {len(found.weighed)} layouts by shapes, {len(found.compiled)} "
        f"compiled, in {found.seconds:.0f} s"
        + (f"; meshes that are not possible, by key: {excluded}" if excluded else "")
    )
    known = {w.layout for w in found.compiled}
    frontier = [w for w in _frontier(found.weighed) if w.layout not in known]
    rows = [*found.compiled, *frontier[:_SHOWN]]
    print_table(
        [
            [
                "yes" if w.fits else "no",
                format_count(w.tokens_per_second),
                f"{w.mfu:.0%}",
                format_bytes(w.needed),
                format_bytes(w.spare) if w.fits else f"-{format_bytes(-w.spare)}",
                w.how,
                w.layout.overrides + " (as given)" * (w.layout == found.given),
            ]
            for w in rows
        ],
        ["fits", "tokens/s", "MFU", "needed", "left", "memory is", "layout"],
        "layouts, predicted",
    )
    if found.best:
        print(f"best        {found.best.layout.overrides}")
    else:
        print(
            "best        none fits: take more chips, larger ones, or shorter rows "
            "(data.sequence_length)"
        )


def _frontier(ranked: Iterable[Weighed]) -> list[Weighed]:
    """Keep the fastest that fits, and each that leaves more memory than all faster."""
    kept = list[Weighed]()
    for one in ranked:
        if one.fits and (not kept or one.needed < kept[-1].needed):
            kept.append(one)
    return kept


def _rank(one: Weighed) -> tuple[bool, float, int]:
    return not one.fits, one.step_s if one.fits else one.needed, one.needed


def _variant(program: Program, layout: Layout) -> Program:
    """Give the program of a layout, from one with its mesh."""
    return replace(
        program,
        config=layout.applied(program.config),
        how=program.how._replace(remat=layout.remat),
    )


def _weighed(layout: Layout, outlook: Outlook, room: Room) -> Weighed:
    needed, prediction = outlook.ledger.needed, outlook.prediction
    assert needed is not None
    if prediction is None:
        rule = f"cannot compare layouts: {outlook.unpredicted}"
        raise ConfigError([Mistake("search", True, rule)])
    middle = prediction.middle
    return Weighed(
        layout=layout,
        needed=needed.bytes,
        available=room.available,
        step_s=middle.step_s,
        tokens_per_second=middle.tokens_per_second,
        mfu=middle.mfu,
        how=needed.how,
    )


def _cached(config: Config, devices: Sequence[Device], room: Room) -> Path:
    """Name the file of what was found for a config, whatever its own layout."""
    layout = ("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.planned", "mesh.dcn")
    searched = (*layout, "train.remat", "train.accumulation_steps")
    idle = ("seed", "schedule", "train.num_steps", "optimizer.learning_rate")
    kind = devices[0].device_kind, len(devices), num_slices(devices), room.available
    left = (*HARMLESS, *searched, *idle)
    same = {k: v for k, v in flatten(config).items() if not covered(k, left)}
    about = json.dumps([same, kind, versions(), code_version()], sort_keys=True)
    digits = hashlib.sha256(about.encode()).hexdigest()[:16]
    return cache_dir() / "plans" / f"{digits}.json"
