"""The ways to lay a step out on devices, and what a search among them came to."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.config import ModelConfig, OffloadName
from train.config import MESH_AXES, Config, DcnConfig
from train.console import print_table
from train.errors import ConfigError
from train.mesh_sizes import axis_sizes
from train.plan.recomputing import parsed, typed, ways, ways_beside
from train.units import format_bytes, format_count

_MOST_TENSOR = 16
_LEAST_POSITIONS = 8192  # of a device: rows that are no longer are not shared
_SHOWN = 10  # layouts


@dataclass(frozen=True)
class Layout:
    """A layout: sizes of the mesh axes, which of them cross slices or nodes, and how
    a step is cut and recomputed (as train/plan/recomputing.py types it)."""

    data: int
    fsdp: int
    tensor: int
    dcn_data: int
    dcn_fsdp: int
    remat: str
    accumulation_steps: int
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    dcn_pipeline: int = 1

    @property
    def of_layers(self) -> tuple[int, ...]:
        """Into how many parts layers are cut, and what passes between them."""
        return self.tensor, self.expert, self.context, self.pipeline

    @property
    def overrides(self) -> str:
        """What to type."""
        mesh = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        rest = {axis: getattr(self, axis) for axis in MESH_AXES if axis not in mesh}
        mesh |= {axis: n for axis, n in rest.items() if n > 1}
        dcn = {"pipeline": self.dcn_pipeline}
        dcn |= {"data": self.dcn_data, "fsdp": self.dcn_fsdp}
        return " ".join(
            [
                *(f"mesh.{axis}={n}" for axis, n in mesh.items()),
                *(f"mesh.dcn.{axis}={n}" for axis, n in dcn.items() if n > 1),
                f"train.remat={self.remat}",
                f"train.accumulation_steps={self.accumulation_steps}",
            ]
        )

    def applied(self, config: Any) -> Any:
        """Return a config with this layout."""
        mesh = replace(
            config.mesh,
            **{axis: getattr(self, axis) for axis in MESH_AXES},
            planned=False,
            dcn=DcnConfig(
                pipeline=self.dcn_pipeline, data=self.dcn_data, fsdp=self.dcn_fsdp
            ),
        )
        train = replace(
            config.train,
            remat=parsed(self.remat),
            accumulation_steps=self.accumulation_steps,
        )
        return replace(config, mesh=mesh, train=train)


def layouts(
    num_devices: int, parts: int, experts: int = 0, sequence_length: int = 0
) -> list[Layout]:
    """List the meshes: parts are slices or nodes; only some axes go beyond one.

    Stages are parts: inside of one the network is fast enough for fsdp. Devices that
    bring each other tokens, and those that share a matrix or rows, lie inside of one.

    Args:
        num_devices: of all parts.
        parts: of as many devices each.
        experts: of the model; 0: it has none.
        sequence_length: of a row, which devices share only where it is long.
    """
    inside = num_devices // parts
    found, cut = [], ("none", 1)  # in one piece
    most = {"tensor": _MOST_TENSOR, "expert": max(experts, 1)}
    most["context"] = max(sequence_length // _LEAST_POSITIONS, 1)
    sizes = ([n for n in _divisors(inside) if n <= limit] for limit in most.values())
    for tensor, expert, context in itertools.product(*sizes):
        rest, wrong = divmod(inside, tensor * expert * context)
        if wrong:
            continue
        for fsdp in _divisors(rest):
            data, own = rest // fsdp, {"expert": expert, "context": context}
            found.append(Layout(data * parts, fsdp, tensor, parts, 1, *cut, **own))
            if parts > 1:
                found.append(Layout(data, fsdp * parts, tensor, 1, parts, *cut, **own))
                own |= {"pipeline": parts, "dcn_pipeline": parts}
                found.append(Layout(data, fsdp, tensor, 1, 1, *cut, **own))
    return found


def variants(
    layout: Layout,
    batch_size: int,
    model: ModelConfig,
    offload: Sequence[OffloadName] = (),
) -> list[Layout]:
    """Return a mesh with each way to recompute, and each number of microbatches.

    First comes what computes the least, last what needs the least memory.
    """
    shards = layout.data * layout.fsdp * layout.expert * layout.pipeline
    beside = ways_beside(offload)
    numbers = _powers_of_two(batch_size // shards)
    return [
        replace(layout, remat=typed(way), accumulation_steps=steps)
        for way in reversed(ways(model))
        for steps in numbers
        if way in beside
    ]


def layout_of(config: Config, num_devices: int) -> Layout | None:
    """Read the layout that a config has; None if it leaves that to the plan."""
    if config.mesh.planned:
        return None
    try:
        sizes = axis_sizes(config.mesh, num_devices)
    except ConfigError:
        return None
    return Layout(
        **sizes,
        dcn_pipeline=config.mesh.dcn.pipeline,
        dcn_data=config.mesh.dcn.data,
        dcn_fsdp=config.mesh.dcn.fsdp,
        remat=typed(config.train.remat),
        accumulation_steps=config.train.accumulation_steps,
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers_of_two(most: int) -> list[int]:
    return [n for n in (2**i for i in range(most.bit_length())) if most % n == 0]


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
class SearchResult:
    """What a search came to.

    weighed: all layouts by shapes, the fastest that fits first.
    compiled: those that were compiled, likewise.
    given: the layout of the config itself, if it is possible.
    excluded: meshes that are impossible, by the key that says why.
    """

    weighed: list[Candidate]
    compiled: list[Candidate]
    given: Layout | None
    excluded: dict[str, Excluded]
    seconds: float

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits, compiled if any was; None: nothing fits."""
        known = self.compiled or self.weighed
        return known[0] if known and known[0].fits else None

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest, by shapes, of those that fit and cut layers otherwise."""
        cut = self.best and self.best.layout.of_layers
        others = (one for one in self.weighed if one.layout.of_layers != cut)
        other = next(others, None)
        return other if other and other.fits and cut else None

    @property
    def closest(self) -> Candidate:
        """What needs the least memory; what was compiled stands for its estimate."""
        done = {one.layout for one in self.compiled}
        rest = (one for one in self.weighed if one.layout not in done)
        return min((*self.compiled, *rest), key=lambda one: one.needed)


def print_result(result: SearchResult) -> None:
    """Print the frontier: each layout that no other beats in both speed and memory."""
    print(
        f"searched    {len(result.weighed)} layouts by shapes, {len(result.compiled)} "
        f"compiled, in {result.seconds:.0f} s"
    )
    for one in result.excluded.values():
        meshes = f"{one.meshes} mesh{'es' * (one.meshes != 1)}"
        print(f"excluded    {meshes}, the first since {one.why}")
    known = {w.layout for w in result.compiled}
    kept = [w for w in frontier(result.weighed) if w.layout not in known]
    rows = [*result.compiled, *kept[:_SHOWN]]
    if result.best is None and result.closest not in rows:
        rows.append(result.closest)
    print_table(
        [
            [
                "yes" if w.fits else "no",
                format_count(w.tokens_per_second),
                f"{w.mfu:.0%}",
                format_bytes(w.needed),
                format_bytes(w.spare) if w.fits else f"-{format_bytes(-w.spare)}",
                w.how,
                w.layout.overrides + " (as given)" * (w.layout == result.given),
            ]
            for w in rows
        ],
        ["fits", "tokens/s", "MFU", "needed", "left", "memory is", "layout"],
        "layouts, predicted",
    )
    best = result.best.layout.overrides if result.best else none_fits(result)
    print(f"best        {best}")
    if result.best and result.runner_up:
        own = next(w for w in result.weighed if w.layout == result.best.layout)
        slower = result.runner_up.step_s / own.step_s - 1
        more = format_bytes(result.runner_up.needed)
        print(f"next best   {result.runner_up.layout.overrides}")
        print(f"            {slower:+.0%} time a step and {more} a device, estimated")


def none_fits(result: SearchResult) -> str:
    """Return by how much the layout that needs the least does not fit, and what helps.

    A smaller batch is not named: microbatches of a single row were weighed too.
    """
    least = result.closest
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


def frontier(ranked: Iterable[Candidate]) -> list[Candidate]:
    """Keep the fastest that fits, and each that leaves more memory than all faster."""
    kept = list[Candidate]()
    for one in ranked:
        if one.fits and (not kept or one.needed < kept[-1].needed):
            kept.append(one)
    return kept
