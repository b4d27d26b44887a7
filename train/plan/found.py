"""What a search for a layout came to, and how it is said."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from train.console import print_table
from train.plan.candidates import Layout
from train.units import format_bytes, format_count

_SHOWN = 10


@dataclass(frozen=True)
class Weighed:
    """What a layout needs and gives; bytes are of one device.

    held: of what is needed, the state and the batch.
    step_s, tokens_per_second, mfu: the middle of the prediction (plan/roofline.py).
    how: compiled or estimated.
    """

    layout: Layout
    needed: int
    held: int
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
class Excluded:
    """Meshes that are not possible for one reason: how many, and why the first is not.

    A mesh with several reasons counts for each.
    """

    meshes: int
    why: str


@dataclass(frozen=True)
class Found:
    """What a search came to.

    weighed: all layouts by shapes, the fastest that fits first.
    compiled: those that were compiled, likewise.
    given: the layout of the config itself, if it is possible.
    excluded: meshes that are impossible, by the key that says why.
    """

    weighed: list[Weighed]
    compiled: list[Weighed]
    given: Layout | None
    excluded: dict[str, Excluded]
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
            excluded={k: Excluded(**one) for k, one in found["excluded"].items()},
            seconds=found["seconds"],
        )

    @property
    def best(self) -> Weighed | None:
        """The fastest that fits, compiled if any was; None: nothing fits."""
        known = self.compiled or self.weighed
        return known[0] if known and known[0].fits else None

    @property
    def closest(self) -> Weighed:
        """What needs the least memory; what was compiled stands for its estimate."""
        done = {one.layout for one in self.compiled}
        rest = (one for one in self.weighed if one.layout not in done)
        return min((*self.compiled, *rest), key=lambda one: one.needed)


def print_found(found: Found) -> None:
    """Print the frontier: each layout that no other beats in both speed and memory."""
    print(
        f"searched    {len(found.weighed)} layouts by shapes, {len(found.compiled)} "
        f"compiled, in {found.seconds:.0f} s"
    )
    for one in found.excluded.values():
        meshes = f"{one.meshes} mesh{'es' * (one.meshes != 1)}"
        print(f"excluded    {meshes}, the first since {one.why}")
    known = {w.layout for w in found.compiled}
    kept = [w for w in frontier(found.weighed) if w.layout not in known]
    rows = [*found.compiled, *kept[:_SHOWN]]
    if found.best is None and found.closest not in rows:
        rows.append(found.closest)
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
    best = found.best.layout.overrides if found.best else none_fits(found)
    print(f"best        {best}")


def none_fits(found: Found) -> str:
    """Say by how much the layout that needs the least does not fit, and what helps.

    A smaller batch is not named: microbatches of a single row were weighed too.
    """
    least = found.closest
    if least.fits:
        return (
            "none that was compiled fits, but by the estimate others do; to compile "
            "more raise search_minutes"
        )
    helps = "take more or larger chips, shorter rows (data.sequence_length), or"
    if least.held > least.available:
        held = format_bytes(least.held)
        helps = f"its state and batch alone take {held}: take more or larger chips, or"
    return (
        f"none fits; the least is needed by {least.layout.overrides}: "
        f"{format_bytes(least.needed)} a device, {least.how}, of which there are "
        f"{format_bytes(least.available)}, so {format_bytes(-least.spare)} too much; "
        f"{helps} a smaller model"
    )


def frontier(ranked: Iterable[Weighed]) -> list[Weighed]:
    """Keep the fastest that fits, and each that leaves more memory than all faster."""
    kept = list[Weighed]()
    for one in ranked:
        if one.fits and (not kept or one.needed < kept[-1].needed):
            kept.append(one)
    return kept
