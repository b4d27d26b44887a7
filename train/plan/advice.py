"""Name the bottleneck of a predicted step, and the override that relieves it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from jax.sharding import Mesh

from train.cli.rules import config_mistakes
from train.config import Config
from train.console import print_table
from train.mesh_sizes import mesh_mistakes
from train.plan.rates import PCIE, Link
from train.plan.recomputing import format_policy, policies_keeping_more
from train.plan.roofline import MEMORY, Prediction, Range
from train.units import format_bytes, format_count, format_seconds

# The advice names recomputation, exposed collectives and dims only beyond these limits.
_MUCH_RECOMPUTED = 1.1  # executed over model FLOPs
_MUCH_EXPOSED = 0.1  # fraction of the step
_LOW_FILL = 0.9  # fraction of the matrix units that the model's dims fill
_RANGE = {
    "tpu": "low: everything that can overlap does; high: only what is scheduled to",
    "gpu": "20 % above and below the time of kernels that run one after another",
}
# Accuracy on public runs, by platform (docs/log/planner.md).
_ACCURACY = {
    "tpu": "nine public runs that no constant was fitted to took 0.93 to 1.19 times "
    "the middle, 6 % off on average; six were inside the range",
    "gpu": "41 of 43 public runs on A100 and H100 that no constant was fitted to were "
    "within 20 % of the middle, 6 % off on average",
}


@dataclass(frozen=True)
class SuggestedChange:
    """A change that reduces memory, applied on top of the previous changes.

    override: the override that makes the change.
    change: a description of the change.
    needed_bytes: the estimated memory that a device needs after the change.
    fits: whether `needed_bytes` are available.
    """

    override: str
    change: str
    needed_bytes: int
    fits: bool


@dataclass(frozen=True)
class Advice:
    """The bottleneck of a step and its remedy.

    bottleneck: a sentence about the busiest resource, or about missing memory.
    change: a sentence about what to do.
    override: the overrides that make the change; "" if no override helps.
    changes: the changes that reduce memory, if the step does not fit.
    """

    bottleneck: str
    change: str
    override: str = ""
    changes: tuple[SuggestedChange, ...] = ()


def advise(
    prediction: Prediction, config: Config, mesh: Mesh, spare_bytes: int | None = None
) -> Advice:
    """Return the bottleneck of a config's step and a remedy.

    `spare_bytes` is the free memory of a device, or None if it is unknown.
    """
    link = max(prediction.links, key=lambda link: link.seconds, default=None)
    busiest = max(prediction.products, prediction.memory)
    if link and link.seconds > busiest:
        bottleneck = (
            f"bound by the network: {link.name} at {link.bandwidth / 1e9:,.1f} GB/s a "
            f"device takes {_format_share(link.seconds, prediction.step_s)} of the step"
        )
        return _for_network(bottleneck, link, config, mesh)
    if prediction.memory > prediction.products:
        return _for_memory(prediction, config)
    return _for_products(prediction, config, mesh, spare_bytes)


def _for_products(
    prediction: Prediction, config: Config, mesh: Mesh, spare_bytes: int | None
) -> Advice:
    train, step = config.train, prediction.step_s
    policies = policies_keeping_more(train)
    can_save_more = policies and prediction.recomputed > _MUCH_RECOMPUTED
    link = max(prediction.links, key=lambda link: link.exposed, default=None)
    exposed = sum(link.exposed for link in prediction.links)
    is_exposed = exposed > _MUCH_EXPOSED * step.middle
    bottleneck = (
        "bound by computing: matrix products take "
        f"{_format_share(prediction.products, step)} of the step"
    )
    if can_save_more:
        bottleneck += f", {prediction.recomputed:.2f} x what the model needs"
    if prediction.fill < _LOW_FILL:
        bottleneck += f"; the model's dims fill {prediction.fill:.0%} of matrix units"
    if link and is_exposed:
        bottleneck += (
            "; collectives that no product overlaps take "
            f"{_format_share(exposed, step)}, most of it {link.name}"
        )
    if can_save_more:
        condition = "if the saved activations fit"
        if spare_bytes is not None:
            condition += f" into the remaining {format_bytes(max(0, spare_bytes))}"
        override = f"train.remat={format_policy(policies[0])}"
        return Advice(bottleneck, f"recompute less, {condition}", override)
    if link and is_exposed:
        return _for_network(bottleneck, link, config, mesh)
    if prediction.fill < _LOW_FILL:
        change = "make dims multiples of a matrix unit's rows, the head dim first"
        return Advice(bottleneck, change)
    return Advice(
        bottleneck, "little is left to gain on these chips; use more or faster chips"
    )


def _for_memory(prediction: Prediction, config: Config) -> Advice:
    bottleneck = (
        "bound by main memory: reading and writing takes "
        f"{_format_share(prediction.memory, prediction.step_s)} of the step, "
        "if no cache helps"
    )
    if config.train.accumulation_steps > 1:
        return Advice(
            bottleneck,
            "use fewer, larger microbatches, if their activations fit: weights and "
            "gradients pass through memory once for each microbatch",
            _microbatches_override(config),
        )
    return Advice(
        bottleneck,
        "give each chip more tokens, if they fit: the traffic of weights and optimizer "
        "does not grow with them",
        f"data.batch_size={2 * config.data.batch_size}",
    )


def _microbatches_override(config: Config) -> str:
    steps = config.train.accumulation_steps
    return f"train.accumulation_steps={steps // _least_prime_factor(steps)}"


def _for_network(bottleneck: str, link: Link, config: Config, mesh: Mesh) -> Advice:
    """Return advice that makes `link` less busy."""
    if link.network == PCIE:
        key = "train.offload=[]" if config.train.offload else "optimizer.offload=false"
        return Advice(bottleneck, "keep more in the device's memory, if it fits", key)
    reshard = partial(_reshard_overrides, config, mesh)
    within = "inside a slice or node, and let only the data axis span several"
    is_slow = link.network in ("DCN", "network")
    if is_slow and "tensor" in link.axes:
        change = f"keep the tensor axis {within}"
        if override := reshard("tensor", "data", move_dcn=True):
            return Advice(bottleneck, change, override)
    if is_slow and "fsdp" in link.axes:
        change = f"shard parameters {within}"
        if override := reshard("fsdp", "data", move_dcn=True):
            return Advice(bottleneck, change, override)
    if "tensor" in link.axes:
        change = "shard each layer over fewer devices, if the step still fits: all "
        change += "layers send activations"
        if override := reshard("tensor", "fsdp", move_dcn=False):
            return Advice(bottleneck, change, override)
    if config.train.accumulation_steps > 1:
        change = "use fewer, larger microbatches, if their activations fit: parameters "
        change += "are gathered, and gradients reduced, for each microbatch"
        return Advice(bottleneck, change, _microbatches_override(config))
    change = "give each chip more tokens, if they fit: the traffic of parameters and "
    change += "gradients does not grow with the batch"
    return Advice(bottleneck, change, f"data.batch_size={2 * config.data.batch_size}")


def _reshard_overrides(
    config: Config, mesh: Mesh, source: str, target: str, *, move_dcn: bool
) -> str:
    """Return overrides that shrink the `source` mesh axis and enlarge `target`.

    Both sizes change by one factor: the number of slices or nodes along `source` if
    `move_dcn`, otherwise the least prime factor of the size of `source`. If the new
    mesh needs more rows, the batch grows by this factor. Returns "" if the factor is 1
    or the changed config is invalid.
    """
    size, dcn = mesh.shape[source], config.mesh.dcn
    factor = getattr(dcn, source) if move_dcn else _least_prime_factor(size)
    if factor == 1:
        return ""
    sizes = {source: size // factor, target: factor * mesh.shape[target]}
    dcn_factors = {source: 1, target: factor * getattr(dcn, target)} if move_dcn else {}
    overrides = [f"mesh.{axis}={n}" for axis, n in sizes.items()]
    overrides += [f"mesh.dcn.{axis}={n}" for axis, n in dcn_factors.items()]
    new_mesh = replace(config.mesh, **sizes, dcn=replace(dcn, **dcn_factors))
    rows = config.data.batch_size
    for batch_size in (rows, rows * factor):
        data = replace(config.data, batch_size=batch_size)
        candidate = replace(config, mesh=new_mesh, data=data)
        if not (config_mistakes(candidate) or mesh_mistakes(candidate, mesh.size)):
            if batch_size != rows:
                overrides.append(f"data.batch_size={batch_size}")
            return " ".join(overrides)
    return ""


def _least_prime_factor(number: int) -> int:
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def _format_share(seconds: float, step: Range) -> str:
    return f"{format_seconds(seconds)} ({seconds / step.middle:.0%})"


def print_prediction(prediction: Prediction, advice: Advice) -> None:
    """Print the time of each resource, the predicted range and the advice."""
    source = prediction.how
    rows = [
        ["matrix products", format_seconds(prediction.products), "", source],
        ["main memory", format_seconds(prediction.memory), "", f"{source}, at most"],
    ]
    for link in prediction.links:
        hidden = f"{link.hidden / link.seconds:.0%}" if link.seconds else ""
        rows.append([link.name, format_seconds(link.seconds), hidden, source])
    headers = ["resource", "busy", "overlapped", "source"]
    print_table(rows, headers, "time of a step by resource (computed)")
    print_texts(summary_sentences(prediction, advice))


def print_texts(texts: Iterable[tuple[str, str]]) -> None:
    """Print each pair of a title and a sentence on a line."""
    for name, text in texts:
        print(f"{name:<11} {text}")


def summary_sentences(prediction: Prediction, advice: Advice) -> list[tuple[str, str]]:
    """Return titles and sentences about the speed, the bottleneck and its remedy."""
    step, middle, mfu = prediction.step_s, prediction.middle, prediction.range("mfu")
    speed = prediction.range("tokens_per_second")
    per_chip = prediction.range("tokens_per_second_per_chip")
    return [
        (
            "predicted",
            f"{_format_range(step, format_seconds)} a step, estimated "
            f"({_RANGE[prediction.platform]})",
        ),
        (
            "tokens/s",
            f"{_format_range(speed, format_count)}, "
            f"{_format_range(per_chip, format_count)} a chip; middle "
            f"{format_count(middle.tokens_per_second)} and "
            f"{format_count(middle.tokens_per_second_per_chip)}",
        ),
        ("accuracy", _ACCURACY[prediction.platform]),
        (
            "MFU",
            f"{mfu.low:.0%} to {mfu.high:.0%}, middle {middle.mfu:.0%} (6N + 12LCT, "
            "causal not halved)",
        ),
        *_memory_sentences(prediction),
        *remedy_sentences(advice),
    ]


def _memory_sentences(prediction: Prediction) -> list[tuple[str, str]]:
    texts = [
        f"the {section.name} with {_format_share(section.memory, prediction.step_s)}"
        for section in prediction.sections
        if section.bound_by == MEMORY
    ]
    sentence = f"main memory bounds {' and '.join(texts)} of the step"
    return [("sections", sentence)] if texts else []


def print_remedy(advice: Advice) -> None:
    """Print why a step does not fit, and the memory needed after each change."""
    print_texts(remedy_sentences(advice))
    rows = [
        [c.override, c.change, format_bytes(c.needed_bytes), "yes" if c.fits else "no"]
        for c in advice.changes
    ]
    if rows:
        headers = ["override", "what it does", "needed then", "fits"]
        print_table(rows, headers, "changes, each on top of those above it (estimated)")


def remedy_sentences(advice: Advice) -> list[tuple[str, str]]:
    """Return titles and sentences about the bottleneck and its remedy."""
    override = f": {advice.override}" if advice.override else ""
    change = f"{advice.change}{override}"
    return [("bottleneck", advice.bottleneck), ("to change", change)]


def _format_range(values: Range, format_value: Callable[[float], str]) -> str:
    return f"{format_value(values.low)} to {format_value(values.high)}"
