"""What a predicted step waits for, in a sentence, and what to type to change it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from jax.sharding import Mesh

from train.cli.rules import validate
from train.config import Config
from train.console import print_table
from train.mesh_sizes import mistakes
from train.plan.recomputing import format_policy, policies_keeping_more
from train.plan.roofline import PCIE, Link, Prediction, Range
from train.units import format_bytes, format_count, format_seconds

_MUCH_RECOMPUTED = 1.1  # executed over model FLOPs
_MUCH_EXPOSED = 0.1  # of the step
_NARROW = 0.9  # part of the matrix units that is used
_RANGE = {
    "tpu": "low: all that can overlap does; high: only what is scheduled to",
    "gpu": "20 % to either side of kernels one after the other",
}
# Of public runs, by platform (benchmarks/results/*_published.json).
_SEEN = {
    "tpu": "nine public runs that nothing was settled on took 0.93 to 1.19 times the "
    "middle, 6 % off on average; six lay in the range",
    "gpu": "40 of 43 public runs on A100 and H100 that nothing was settled on lay "
    "within 20 % of the middle, 6 % off on average",
}


@dataclass(frozen=True)
class SuggestedChange:
    """A change to make a step fit, on top of the changes before it.

    override: what to type.
    change: what it does, in words.
    needed_bytes: the estimated memory that a device then needs.
    fits: whether a device has that much.
    """

    override: str
    change: str
    needed_bytes: int
    fits: bool


@dataclass(frozen=True)
class Advice:
    """What limits a step, and what to change, in words.

    bottleneck: what the step waits for most, or has no room for.
    change: what to do about it.
    override: what to type; "" if no single key helps.
    changes: if the step does not fit, the changes that make it smaller.
    """

    bottleneck: str
    change: str
    override: str = ""
    changes: tuple[SuggestedChange, ...] = ()


def advise(
    prediction: Prediction, config: Config, mesh: Mesh, spare_bytes: int | None = None
) -> Advice:
    """Name the bottleneck of a config's step and a remedy.

    `spare_bytes` are those of a device's memory; None: not known.
    """
    link = max(prediction.links, key=lambda link: link.seconds, default=None)
    busiest = max(prediction.products, prediction.memory)
    if link and link.seconds > busiest:
        bound = (
            f"bound by the network: {link.name} at {link.bandwidth / 1e9:,.1f} GB/s a "
            f"device takes {_of(link.seconds, prediction.step_s)} of the step"
        )
        return Advice(bound, *_less_traffic(link, config, mesh))
    if prediction.memory > prediction.products:
        return _for_memory(prediction, config)
    return _for_products(prediction, config, mesh, spare_bytes)


def _for_products(
    prediction: Prediction, config: Config, mesh: Mesh, spare: int | None
) -> Advice:
    less, step = (
        policies_keeping_more(config.train.remat, config.train.offload),
        prediction.step_s,
    )
    again = less and prediction.recomputed > _MUCH_RECOMPUTED
    what = (
        "bound by computing: matrix products take "
        f"{_of(prediction.products, step)} of the step"
    )
    if again:
        what += f", {prediction.recomputed:.2f} x what the model needs"
    if prediction.fill < _NARROW:
        what += f"; the model's dims fill {prediction.fill:.0%} of the matrix units"
    link = max(prediction.links, key=lambda link: link.exposed, default=None)
    exposed = sum(link.exposed for link in prediction.links)
    waits = exposed > _MUCH_EXPOSED * step.middle
    if link and waits:
        what += (
            f"; collectives that nothing is scheduled beside take "
            f"{_of(exposed, step)}, most of them {link.name}"
        )
    if again:
        room = "if its activations fit"
        if spare is not None:
            room += f" into the {format_bytes(max(0, spare))} that are left"
        return Advice(
            what, f"recompute less, {room}", f"train.remat={format_policy(less[0])}"
        )
    if link and waits:
        return Advice(what, *_less_traffic(link, config, mesh))
    if prediction.fill < _NARROW:
        return Advice(
            what, "make dims, those of a head first, multiples of a unit's rows"
        )
    return Advice(
        what, "little is left to gain on these chips: only more or faster ones help"
    )


def _for_memory(prediction: Prediction, config: Config) -> Advice:
    what = (
        "bound by main memory: what is read and written takes "
        f"{_of(prediction.memory, prediction.step_s)} of the step, if no cache helps"
    )
    microbatches = config.train.accumulation_steps
    if microbatches > 1:
        return Advice(
            what,
            "have fewer, larger microbatches, if their activations fit: weights and "
            "gradients pass memory once in each",
            f"train.accumulation_steps={microbatches // _least_factor(microbatches)}",
        )
    return Advice(
        what,
        "give each chip more tokens, if they fit: what weights and optimizer move does "
        "not grow with them",
        f"data.batch_size={2 * config.data.batch_size}",
    )


def _less_traffic(link: Link, config: Config, mesh: Mesh) -> tuple[str, str]:
    """Say what makes a network less busy, and what to type for it."""
    if link.network == PCIE:
        offload = "optimizer.offload=false"
        if config.train.offload:
            offload = "train.offload=[]"
        return "keep more in the device's memory, if it fits", offload
    far, moved = link.network in ("DCN", "network"), partial(_moved, config, mesh)
    if far and "tensor" in link.axes and (typed := moved("tensor", "data", True)):
        return "keep tensor inside a slice or node, and let copies cross", typed
    if far and "fsdp" in link.axes and (typed := moved("fsdp", "data", True)):
        return (
            "shard parameters inside a slice or node only, and let copies cross",
            typed,
        )
    if "tensor" in link.axes and (typed := moved("tensor", "fsdp", False)):
        return (
            "cut layers into fewer parts, if the rest fits: activations travel in "
            "every layer",
            typed,
        )
    microbatches = config.train.accumulation_steps
    if microbatches > 1:
        return (
            "have fewer, larger microbatches, if their activations fit: parameters "
            "are gathered, and gradients reduced, in each",
            f"train.accumulation_steps={microbatches // _least_factor(microbatches)}",
        )
    batch = f"data.batch_size={2 * config.data.batch_size}"
    return (
        "give each chip more tokens, if they fit: parameters and gradients travel as "
        "often whatever the batch",
        batch,
    )


def _moved(config: Config, mesh: Mesh, axis: str, to: str, across: bool) -> str:
    """Return what to type for fewer parts along one axis, and more along another.

    `across`: by as many as lie in other slices or nodes; else by the least factor. With
    more rows, where there are too few for the devices that share them then. "" where
    that would be refused, or changes nothing.
    """
    size, dcn = mesh.shape[axis], config.mesh.dcn
    by = getattr(dcn, axis) if across else _least_factor(size)
    sizes = {axis: size // by, to: by * mesh.shape[to]}
    parts = {axis: 1, to: by * getattr(dcn, to)} if across else {}
    typed = [f"mesh.{name}={n}" for name, n in sizes.items()]
    typed += [f"mesh.dcn.{name}={n}" for name, n in parts.items()]
    changed = replace(config.mesh, **sizes, dcn=replace(dcn, **parts))
    for times in (1, by) if by > 1 else ():
        rows = times * config.data.batch_size
        data = replace(config.data, batch_size=rows)
        moved = replace(config, mesh=changed, data=data)
        if not (validate(moved) or mistakes(moved, mesh.size)):
            more = [f"data.batch_size={rows}"] if times > 1 else []
            return " ".join([*typed, *more])
    return ""


def _least_factor(number: int) -> int:
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def _of(seconds: float, step: Range) -> str:
    return f"{format_seconds(seconds)} ({seconds / step.middle:.0%})"


def print_prediction(prediction: Prediction, advice: Advice) -> None:
    """Print what each resource takes, the range, and what to change."""
    how = prediction.how
    rows = [
        ["matrix products", format_seconds(prediction.products), "", how],
        ["main memory", format_seconds(prediction.memory), "", f"{how}, at most"],
    ] + [
        [
            link.name,
            format_seconds(link.seconds),
            f"{link.hidden / link.seconds:.0%}" if link.seconds else "",
            how,
        ]
        for link in prediction.links
    ]
    headers = ["resource", "busy", "beside products", "what it does is"]
    print_table(rows, headers, "time of a step by resource (computed)")
    print_texts(summary(prediction, advice))


def print_texts(texts: Iterable[tuple[str, str]]) -> None:
    """Print names and sentences below each other."""
    for name, text in texts:
        print(f"{name:<11} {text}")


def summary(prediction: Prediction, advice: Advice) -> list[tuple[str, str]]:
    """Return how fast a step is, what it waits for and what to change, as text."""
    step, middle, mfu = prediction.step_s, prediction.middle, prediction.range("mfu")
    speed = prediction.range("tokens_per_second")
    a_chip = prediction.range("tokens_per_second_per_chip")
    return [
        (
            "predicted",
            f"{_span(step, format_seconds)} a step, estimated "
            f"({_RANGE[prediction.platform]})",
        ),
        (
            "tokens/s",
            f"{_span(speed, format_count)}, {_span(a_chip, format_count)} a chip; "
            f"middle {format_count(middle.tokens_per_second)} and "
            f"{format_count(middle.tokens_per_second_per_chip)}",
        ),
        ("so far", _SEEN[prediction.platform]),
        (
            "MFU",
            f"{mfu.low:.0%} to {mfu.high:.0%}, middle {middle.mfu:.0%} (6N + 12LCT, "
            "causal not halved)",
        ),
        *remedy(advice),
    ]


def print_remedy(advice: Advice) -> None:
    """Print what a step has no room for, and what each change leaves."""
    print_texts(remedy(advice))
    rows = [
        [c.override, c.change, format_bytes(c.needed_bytes), "yes" if c.fits else "no"]
        for c in advice.changes
    ]
    if rows:
        headers = ["override", "what it does", "needed then", "fits"]
        print_table(rows, headers, "changes, each on top of those above it (estimated)")


def remedy(advice: Advice) -> list[tuple[str, str]]:
    """Return what a step waits for, or has no room for, and what to change, as text."""
    typed = f": {advice.override}" if advice.override else ""
    return [
        ("bottleneck", advice.bottleneck),
        ("to change", f"{advice.change}{typed}"),
    ]


def _span(of: Range, shown: Callable[[float], str]) -> str:
    return f"{shown(of.low)} to {shown(of.high)}"
