"""What a search among layouts came to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from train.config import Config
from train.console import print_table
from train.errors import ConfigError, Mistake
from train.plan.plan import Plan
from train.plan.search.candidates import Layout
from train.units import format_bytes, format_count

_SHOWN = 10  # layouts


@dataclass(frozen=True)
class Candidate:
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
class Failed:
    """Layouts whose cost could not be estimated for one reason.

    layouts: their number; first: one of them; why: the error that it raised.
    """

    layouts: int
    first: Layout
    why: str


@dataclass(frozen=True)
class SearchResult:
    """What a search came to.

    weighed: all layouts by shapes, the fastest that fits first.
    compiled: those that were compiled, likewise.
    given: the layout of the config itself, if it is possible.
    excluded: meshes that are impossible, by the key that says why.
    failed: layouts that could not be estimated, by the name of the error.
    """

    weighed: list[Candidate]
    compiled: list[Candidate]
    given: Layout | None
    excluded: dict[str, Excluded]
    seconds: float
    failed: dict[str, Failed] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits, compiled if any was; None: nothing fits."""
        candidates = self.compiled or self.weighed
        return candidates[0] if candidates and candidates[0].fits else None

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest, by shapes, of those that fit and cut layers otherwise."""
        cut = self.best and self.best.layout.of_layers
        candidates = (one for one in self.weighed if one.layout.of_layers != cut)
        candidate = next(candidates, None)
        return candidate if candidate and candidate.fits and cut else None

    @property
    def closest(self) -> Candidate:
        """What needs the least memory; what was compiled stands for its estimate."""
        done = {one.layout for one in self.compiled}
        candidates = (one for one in self.weighed if one.layout not in done)
        return min((*self.compiled, *candidates), key=lambda one: one.needed)


def print_result(result: SearchResult, config: Config) -> None:
    """Print the frontier: each layout that no other beats in both speed and memory.

    Each is what to type behind the command of the config that was searched for.
    """
    print(
        f"searched    {len(result.weighed)} layouts by shapes, {len(result.compiled)} "
        f"compiled, in {result.seconds:.0f} s"
    )
    for one in result.excluded.values():
        meshes = f"{one.meshes} mesh{'es' * (one.meshes != 1)}"
        print(f"impossible  {meshes}; the first of them: {one.why}")
    for sentence in failures(result.failed, config):
        print(f"failed      {sentence}")
    compiled_layouts = {w.layout for w in result.compiled}
    fitting = (w for w in result.weighed if w.fits)
    shown = [w for w in frontier(fitting) if w.layout not in compiled_layouts]
    rows = [*result.compiled, *shown[:_SHOWN]]
    requested = [w for w in result.weighed if w.layout == result.given]
    requested = [] if result.given in compiled_layouts else requested
    for one in [*requested, *([] if result.best else [result.closest])]:
        rows += [one] if one not in rows else []
    print_table(
        [
            [
                "yes" if w.fits else "no",
                format_count(w.tokens_per_second),
                f"{w.mfu:.0%}",
                format_bytes(w.needed),
                format_bytes(w.spare) if w.fits else f"-{format_bytes(-w.spare)}",
                w.how,
                w.layout.overrides(config)
                + " (this config's)" * (w.layout == result.given),
            ]
            for w in rows
        ],
        ["fits", "tokens/s", "MFU", "needed", "left", "memory is", "layout"],
        "layouts, predicted",
    )
    _print_changes(result.weighed, config)
    best = result.best
    outcome = best.layout.overrides(config) if best else none_fits(result, config)
    print(f"best        {outcome}")
    if best and result.runner_up:
        requested = next(w for w in result.weighed if w.layout == best.layout)
        runner_up = result.runner_up
        print(f"next best   {runner_up.layout.overrides(config)}")
        print(
            f"            the fastest that cuts layers otherwise: "
            f"{runner_up.step_s / requested.step_s - 1:+.0%} time a step, "
            f"{format_bytes(runner_up.needed)} a device instead of "
            f"{format_bytes(requested.needed)}, estimated"
        )


def failures(failed: Mapping[str, Failed], config: Config) -> list[str]:
    """Return a sentence for each reason why layouts could not be estimated."""
    return [
        f"{group.layouts} layout{'s' * (group.layouts != 1)} could not be estimated. "
        f"This is a bug of train.plan. The first is {group.first.overrides(config)}: "
        f"{name}: {group.why}"
        for name, group in failed.items()
    ]


def _print_changes(weighed: Sequence[Candidate], config: Config) -> None:
    """Print what each change alone brings: to the best layout without, and in all."""
    plain = next(one for one in weighed if not one.layout.changes)
    rows = list[list[str]]()
    for change in dict.fromkeys(c for one in weighed for c in one.layout.changes):
        candidates = [one for one in weighed if one.layout.changes == (change,)]
        layout = replace(plain.layout, changes=(change,))
        candidate = next((one for one in candidates if one.layout == layout), None)
        fastest = next((one for one in candidates if one.fits), None)
        rows.append(
            [
                change,
                format_bytes(candidate.needed - plain.needed) if candidate else "",
                f"{candidate.step_s / plain.step_s - 1:+.0%}" if candidate else "",
                format_count(fastest.tokens_per_second) if fastest else "none fits",
                fastest.layout.overrides(config) if fastest else "",
            ]
        )
    if rows:
        headers = ["change", "needed", "time a step", "tokens/s", "fastest that fits"]
        against = f"needed and time against {plain.layout.overrides(config)}"
        print_table(rows, headers, f"each change by itself; {against}")


def none_fits(result: SearchResult, config: Config) -> str:
    """Return by how much the layout that needs the least does not fit, and what helps.

    A smaller batch is not named: microbatches of a single row were weighed too.
    """
    smallest = result.closest
    if smallest.fits:
        return (
            "none that was compiled fits, but by the estimate others do; to compile "
            "more raise search_minutes"
        )
    helps = "take more or larger chips, shorter rows (data.sequence_length), or"
    if smallest.held > smallest.available:
        host = format_bytes(smallest.held)
        helps = f"its state and batch alone take {host}: take more or larger chips, or"
    more = ""
    if not any(one.layout.changes for one in result.weighed):
        more = "; search_precision=true weighs small moments and host memory too"
    return (
        f"none fits; the least is needed by {smallest.layout.overrides(config)}: "
        f"{format_bytes(smallest.needed)} a device, {smallest.how}, of which there are "
        f"{format_bytes(smallest.available)}, so {format_bytes(-smallest.spare)} too "
        f"much; {helps} a smaller model{more}"
    )


def frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Keep the fastest, and each that needs less memory than all that are faster."""
    frontier_so_far = list[Candidate]()
    for one in sorted(candidates, key=lambda one: (one.step_s, one.needed)):
        if not frontier_so_far or one.needed < frontier_so_far[-1].needed:
            frontier_so_far.append(one)
    return frontier_so_far


def as_candidate(layout: Layout, plan: Plan) -> Candidate:
    """Return what a plan says of a layout.

    Raises:
        ConfigError: if nobody states how fast the devices are.
    """
    needed, prediction = plan.memory.needed, plan.prediction
    if prediction is None:
        rule = f"cannot compare layouts: {plan.unpredicted}"
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


def rank(one: Candidate) -> tuple[bool, float, int]:
    """Return a key that sorts candidates: the fastest that fits first."""
    return not one.fits, one.step_s if one.fits else one.needed, one.needed
