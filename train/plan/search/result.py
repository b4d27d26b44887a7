"""The result of a layout search."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from train.config import Config
from train.console import print_table
from train.errors import ConfigError, Mistake
from train.plan.plan import Plan
from train.plan.search.candidates import Layout
from train.units import format_bytes, format_count

_MAX_SHOWN = 10  # printed layouts that were not compiled


@dataclass(frozen=True)
class Candidate:
    """The memory of one device and the speed of a layout.

    held: the bytes of the state and the batch, which are part of `needed`.
    step_s, tokens_per_second, mfu: the middle of the prediction (plan/roofline.py).
    how: whether `needed` is compiled or estimated.
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
        """The available bytes that the step leaves free, negative if it needs more."""
        return self.available - self.needed


@dataclass(frozen=True)
class Excluded:
    """Meshes that break one rule.

    meshes: the number of meshes; why: how the first of them breaks the rule.
    """

    meshes: int
    why: str


@dataclass(frozen=True)
class Failed:
    """Layouts whose estimate raised the same type of error.

    layouts: the number of layouts; first: the first layout; why: its error message.
    """

    layouts: int
    first: Layout
    why: str


@dataclass(frozen=True)
class SearchResult:
    """The result of a layout search.

    weighed: all estimated layouts, sorted by `rank`.
    compiled: the compiled layouts, sorted by `rank`.
    given: the layout of the config itself, if it is possible.
    excluded: impossible meshes, by the key of the broken rule.
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
        """The fastest layout that fits, of the compiled ones if there are any."""
        candidates = self.compiled or self.weighed
        return candidates[0] if candidates and candidates[0].fits else None

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest estimated layout that fits and shards layers unlike `best`."""
        shards = self.best and self.best.layout.layer_shards
        candidates = (c for c in self.weighed if c.layout.layer_shards != shards)
        fastest = next(candidates, None)
        return fastest if fastest and fastest.fits and shards else None

    @property
    def closest(self) -> Candidate:
        """The layout that needs least memory; compiled figures replace estimates."""
        compiled = {c.layout for c in self.compiled}
        candidates = (c for c in self.weighed if c.layout not in compiled)
        return min((*self.compiled, *candidates), key=lambda c: c.needed)


def print_result(result: SearchResult, config: Config) -> None:
    """Print the compiled layouts, the frontier, and the best layout as overrides."""
    print(
        f"searched    {len(result.weighed)} layouts by shapes, {len(result.compiled)} "
        f"compiled, in {result.seconds:.0f} s"
    )
    for rule in result.excluded.values():
        meshes = f"{rule.meshes} mesh{'es' * (rule.meshes != 1)}"
        print(f"impossible  {meshes}; the first of them: {rule.why}")
    for sentence in failures(result.failed, config):
        print(f"failed      {sentence}")
    compiled_layouts = {c.layout for c in result.compiled}
    fitting = (c for c in result.weighed if c.fits)
    uncompiled = [c for c in frontier(fitting) if c.layout not in compiled_layouts]
    rows = [*result.compiled, *uncompiled[:_MAX_SHOWN]]
    requested = [c for c in result.weighed if c.layout == result.given]
    requested = [] if result.given in compiled_layouts else requested
    for c in [*requested, *([] if result.best else [result.closest])]:
        rows += [c] if c not in rows else []
    print_table(
        [
            [
                "yes" if c.fits else "no",
                format_count(c.tokens_per_second),
                f"{c.mfu:.0%}",
                format_bytes(c.needed),
                format_bytes(c.spare) if c.fits else f"-{format_bytes(-c.spare)}",
                c.how,
                c.layout.overrides(config)
                + " (this config's)" * (c.layout == result.given),
            ]
            for c in rows
        ],
        ["fits", "tokens/s", "MFU", "needed", "spare", "source", "layout"],
        "layouts, predicted",
    )
    _print_changes(result.weighed, config)
    best = result.best
    outcome = best.layout.overrides(config) if best else none_fits(result, config)
    print(f"best        {outcome}")
    if best and result.runner_up:
        estimated = next(c for c in result.weighed if c.layout == best.layout)
        runner_up = result.runner_up
        print(f"next best   {runner_up.layout.overrides(config)}")
        print(
            f"            the fastest that shards layers differently: "
            f"{runner_up.step_s / estimated.step_s - 1:+.0%} time a step, "
            f"{format_bytes(runner_up.needed)} a device instead of "
            f"{format_bytes(estimated.needed)}, estimated"
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
    """Print the effect of each change alone on the best layout without changes."""
    plain = next(c for c in weighed if not c.layout.changes)
    rows = list[list[str]]()
    for change in dict.fromkeys(name for c in weighed for name in c.layout.changes):
        candidates = [c for c in weighed if c.layout.changes == (change,)]
        layout = replace(plain.layout, changes=(change,))
        changed = next((c for c in candidates if c.layout == layout), None)
        fastest = next((c for c in candidates if c.fits), None)
        rows.append(
            [
                change,
                format_bytes(changed.needed - plain.needed) if changed else "",
                f"{changed.step_s / plain.step_s - 1:+.0%}" if changed else "",
                format_count(fastest.tokens_per_second) if fastest else "none fits",
                fastest.layout.overrides(config) if fastest else "",
            ]
        )
    if rows:
        headers = ["change", "needed", "time a step", "tokens/s", "fastest that fits"]
        against = f"needed and time against {plain.layout.overrides(config)}"
        print_table(rows, headers, f"each change by itself; {against}")


def none_fits(result: SearchResult, config: Config) -> str:
    """Return a sentence about the missing memory and the remedies.

    A smaller batch is no remedy, because the search has weighed microbatches of a
    single local row.
    """
    smallest = result.closest
    if smallest.fits:
        return (
            "no compiled layout fits, but others are estimated to fit; to compile "
            "more, raise search_minutes"
        )
    remedy = "take more or larger chips, shorter rows (data.sequence_length), or"
    if smallest.held > smallest.available:
        size = format_bytes(smallest.held)
        remedy = f"its state and batch alone take {size}: take more or larger chips, or"
    hint = ""
    if not any(c.layout.changes for c in result.weighed):
        hint = "; search_precision=true weighs small moments and host memory too"
    return (
        f"none fits; the least is needed by {smallest.layout.overrides(config)}: "
        f"{format_bytes(smallest.needed)} a device, {smallest.how}, of which there are "
        f"{format_bytes(smallest.available)}, so {format_bytes(-smallest.spare)} too "
        f"much; {remedy} a smaller model{hint}"
    )


def frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that need less memory than every faster candidate."""
    kept = list[Candidate]()
    for c in sorted(candidates, key=lambda c: (c.step_s, c.needed)):
        if not kept or c.needed < kept[-1].needed:
            kept.append(c)
    return kept


def as_candidate(layout: Layout, plan: Plan) -> Candidate:
    """Return the candidate of a planned layout.

    Raises:
        ConfigError: if the rates of the devices are unknown.
    """
    needed, prediction = plan.memory.needed, plan.prediction
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


def rank(c: Candidate) -> tuple[bool, float, int]:
    """Return a sort key: fitting candidates by time, then all others by memory."""
    return not c.fits, c.step_s if c.fits else c.needed, c.needed
