"""The result of a layout search."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from train.config import MeshConfig
from train.console import print_table
from train.plan.cost import COMPILED
from train.plan.memory import Figure, Verdict, judge
from train.plan.search.candidates import Layout
from train.units import format_bytes, format_count


@dataclass(frozen=True)
class Candidate:
    """The memory of one device and the speed of a layout.

    held: the bytes of the state and the batch, which are part of `needed`.
    step_s, tokens_per_second, mfu: the middle of the prediction (plan/roofline.py).
    how: the source of `needed` (plan/memory.py).
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
    def verdict(self) -> Verdict:
        """Whether the layout fits, for people."""
        return judge(Figure(self.needed, self.how), self.available)


@dataclass(frozen=True)
class SearchResult:
    """The result of a layout search.

    weighed: all estimated layouts, sorted by `rank`.
    compiled: the compiled layouts, wholly or as small copies, sorted by `rank`.
    given: the layout of the config itself, if it is possible.
    excluded: how the first impossible mesh breaks a rule, by the rule's key.
    failed: the first layout that could not be planned, and its error, by error name.
    """

    weighed: list[Candidate]
    compiled: list[Candidate]
    given: Layout | None
    excluded: dict[str, str]
    seconds: float
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Candidate:
        """The best compiled layout, or the best estimated one if none was compiled."""
        return (self.compiled or self.weighed)[0]

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits."""
        return self.first if self.first.fits else None


def print_result(result: SearchResult, mesh: MeshConfig) -> None:
    """Print the compiled layouts, the frontier, and the best layout as overrides.

    `mesh` is that of the config that was searched, to which the overrides are added.
    """
    compiled = f"{len(result.compiled)} compiled, in {result.seconds:.0f} s"
    print(f"searched    {len(result.weighed)} layouts by shapes, {compiled}")
    for rule in result.excluded.values():
        print(f"impossible  meshes; the first of them: {rule}")
    for error in result.failed.values():
        print(f"failed      a bug of train.plan: {error}")
    fitting = [c for c in frontier(result.weighed) if c.fits]
    requested = [c for c in result.weighed if c.layout == result.given]
    shown = dict[Layout, Candidate]()
    for c in [*result.compiled, *fitting, *requested, result.first]:
        shown.setdefault(c.layout, c)  # Compiled figures replace estimates.
    rows = list[list[str]]()
    for c in shown.values():
        fits = c.verdict.answer
        mfu = f"{c.mfu:.0%}"
        speed = format_count(c.tokens_per_second)
        needed = format_bytes(c.needed)
        suffix = " (this config's)" if c.layout == result.given else ""
        overrides = c.layout.overrides(mesh) + suffix
        rows.append([fits, speed, mfu, needed, c.how, overrides])
    headers = ["fits", "tokens/s", "MFU", "needed", "source", "layout"]
    available = format_bytes(result.first.available)
    print_table(rows, headers, f"layouts, predicted; {available} are available")
    best = result.best
    outcome = best.layout.overrides(mesh) if best else none_fits(result, mesh)
    print(f"best        {outcome}")
    if best and best.how != COMPILED:
        print(f"memory      {best.how}; compile this layout before you rely on it")


def none_fits(result: SearchResult, mesh: MeshConfig) -> str:
    """Return sentences about the missing memory and the remedies."""
    smallest = result.first
    return (
        f"none fits. The least is needed by {smallest.layout.overrides(mesh)}: "
        f"{format_bytes(smallest.needed)} a device ({smallest.how}), of which state "
        f"and batch take {format_bytes(smallest.held)}. Only "
        f"{format_bytes(smallest.available)} are available. These may help: larger "
        "chips or more of them, shorter rows (data.sequence_length), small moments and "
        "host memory (search_precision=true), more time (search_minutes)."
    )


def frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that need less memory than every faster candidate."""
    kept = list[Candidate]()
    for c in sorted(candidates, key=lambda c: (c.step_s, c.needed)):
        if not kept or c.needed < kept[-1].needed:
            kept.append(c)
    return kept


def rank(c: Candidate) -> tuple[bool, float, int]:
    """Return a sort key: fitting candidates by time, then all others by memory."""
    return not c.fits, c.step_s if c.fits else c.needed, c.needed
