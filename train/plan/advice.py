"""Name the bottleneck of a predicted step, and the override that relieves it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from train.cli.rules import config_mistakes
from train.config import Config
from train.console import print_table
from train.mesh_sizes import mesh_mistakes
from train.plan.rates import FAR, PCIE, Link
from train.plan.recomputing import format_policy, policies_keeping_more
from train.plan.roofline import Prediction, Range
from train.units import format_bytes, format_count, format_seconds

# The advice names recomputation, exposed collectives and dims only beyond these limits.
_MUCH_RECOMPUTED = 1.1  # executed over model FLOPs
_MUCH_EXPOSED = 0.1  # fraction of the step
_LOW_FILL = 0.9  # fraction of the matrix units that the model's dims fill
_RANGE = {
    "tpu": "low: everything that can overlap does; high: only what is scheduled to",
    "gpu": "around the time of kernels that run one after another",
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


def advise(prediction: Prediction, config: Config, mesh: Mesh) -> Advice:
    """Return the bottleneck of a config's step and a remedy."""

    def share(seconds: float) -> str:
        fraction = seconds / prediction.step_s.middle
        return f"{format_seconds(seconds)} ({fraction:.0%}) of the step"

    link = max(prediction.links, key=lambda link: link.seconds, default=None)
    if link and link.seconds > max(prediction.products, prediction.memory):
        bottleneck = f"bound by the network: {link.name} at "
        bottleneck += f"{link.bandwidth / 1e9:,.1f} GB/s a device takes "
        return _for_network(bottleneck + share(link.seconds), link, config, mesh)
    if prediction.memory > prediction.products:
        bottleneck = "bound by main memory: reading and writing takes "
        bottleneck += f"{share(prediction.memory)}, if no cache helps"
        return _for_fewer_passes(bottleneck, config)
    bottleneck = "bound by computing: matrix products take "
    bottleneck += share(prediction.products)
    policies = policies_keeping_more(config.train)
    if policies and prediction.recomputed > _MUCH_RECOMPUTED:
        bottleneck += f", {prediction.recomputed:.2f} x what the model needs"
        change = "recompute less, if the saved activations fit"
        return Advice(bottleneck, change, f"train.remat={format_policy(policies[0])}")
    exposed_s = sum(link.exposed for link in prediction.links)
    if exposed_s > _MUCH_EXPOSED * prediction.step_s.middle:
        link = max(prediction.links, key=lambda link: link.exposed)
        bottleneck += "; collectives that no product overlaps take "
        bottleneck += f"{share(exposed_s)}, most of it {link.name}"
        return _for_network(bottleneck, link, config, mesh)
    if prediction.fill < _LOW_FILL:
        bottleneck += f"; the model's dims fill {prediction.fill:.0%} of matrix units"
        change = "make dims multiples of a matrix unit's rows, the head dim first"
        return Advice(bottleneck, change)
    return Advice(
        bottleneck, "little is left to gain on these chips; use more or faster chips"
    )


def _for_network(bottleneck: str, link: Link, config: Config, mesh: Mesh) -> Advice:
    """Return advice that makes `link` less busy."""
    if link.network == PCIE:
        key = "train.offload=[]" if config.train.offload else "optimizer.offload=false"
        return Advice(bottleneck, "keep more in the device's memory, if it fits", key)
    change = "shard each layer over fewer devices, if the step still fits: all layers "
    proposals = [("tensor", "fsdp", f"{change}send activations")]
    if link.network in FAR:
        inside = "inside a slice or node, and let only the data axis span several"
        proposals.insert(0, ("fsdp", "data", f"shard parameters {inside}"))
        proposals.insert(0, ("tensor", "data", f"keep the tensor axis {inside}"))
    for source, target, change in proposals:
        override = _reshard_overrides(config, mesh, source, target)
        if source in link.axes and override:
            return Advice(bottleneck, change, override)
    return _for_fewer_passes(bottleneck, config)


def _for_fewer_passes(bottleneck: str, config: Config) -> Advice:
    """Return advice that moves parameters and gradients less often for each token."""
    steps = config.train.accumulation_steps
    if steps > 1:
        change = "use fewer, larger microbatches, if their activations fit: parameters "
        change += "and gradients are moved for each microbatch"
        override = f"train.accumulation_steps={steps // _least_prime_factor(steps)}"
        return Advice(bottleneck, change, override)
    change = "give each chip more tokens, if they fit: the traffic of parameters and "
    change += "gradients does not grow with them"
    return Advice(bottleneck, change, f"data.batch_size={2 * config.data.batch_size}")


def _reshard_overrides(config: Config, mesh: Mesh, source: str, target: str) -> str:
    """Return overrides that shrink the `source` mesh axis and enlarge `target`.

    Both sizes change by one factor. It is the number of slices or nodes along `source`
    if the target is the data axis, otherwise the least prime factor of the size of
    `source`. If the new mesh needs more rows, the batch grows by this factor. Returns
    "" if the factor is 1 or the changed config is invalid.
    """
    dcn, rows, size = config.mesh.dcn, config.data.batch_size, mesh.shape[source]
    moves_dcn = target == "data"
    factor = getattr(dcn, source) if moves_dcn else _least_prime_factor(size)
    sizes = {source: size // factor, target: factor * mesh.shape[target]}
    overrides = {f"mesh.{axis}": size for axis, size in sizes.items()}
    if moves_dcn:
        dcn_sizes = {source: 1, target: factor * getattr(dcn, target)}
        overrides |= {f"mesh.dcn.{axis}": size for axis, size in dcn_sizes.items()}
        dcn = replace(dcn, **dcn_sizes)
    for batch_size in (rows, rows * factor) if factor > 1 else ():
        data = replace(config.data, batch_size=batch_size)
        new_mesh = replace(config.mesh, **sizes, dcn=dcn)
        candidate = replace(config, mesh=new_mesh, data=data)
        if not (config_mistakes(candidate) or mesh_mistakes(candidate, mesh.size)):
            if batch_size != rows:
                overrides["data.batch_size"] = batch_size
            return " ".join(f"{key}={value}" for key, value in overrides.items())
    return ""


def _least_prime_factor(number: int) -> int:
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


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
    print_texts(plan_sentences(prediction, advice))


def print_remedy(advice: Advice) -> None:
    """Print why a step does not fit, and the memory needed after each change."""
    print_texts(plan_sentences(None, advice))
    rows = [
        [c.override, c.change, format_bytes(c.needed_bytes), "yes" if c.fits else "no"]
        for c in advice.changes
    ]
    if rows:
        headers = ["override", "what it does", "needed then", "fits"]
        print_table(rows, headers, "changes, each on top of those above it (estimated)")


def print_texts(texts: Iterable[tuple[str, str]]) -> None:
    """Print each pair of a title and a sentence on a line."""
    for name, text in texts:
        print(f"{name:<11} {text}")


def plan_sentences(
    prediction: Prediction | None, advice: Advice
) -> list[tuple[str, str]]:
    """Return titles and sentences about the speed, the bottleneck and its remedy.

    `prediction` is None if the step does not fit.
    """
    override = f": {advice.override}" if advice.override else ""
    remedy = [
        ("bottleneck", advice.bottleneck),
        ("to change", f"{advice.change}{override}"),
    ]
    if prediction is None:
        return remedy
    step_s, middle = prediction.step_s, prediction.middle
    step = _format_range(step_s, step_s.middle, format_seconds)
    speed = prediction.range("tokens_per_second")
    speed_text = _format_range(speed, middle.tokens_per_second, format_count)
    per_chip = format_count(middle.tokens_per_second_per_chip)
    mfu = _format_range(prediction.range("mfu"), middle.mfu, "{:.0%}".format)
    sections = (f"{s.name}: {s.bound_by}" for s in prediction.sections)
    return [
        ("predicted", f"{step} for a step, estimated ({_RANGE[prediction.platform]})"),
        ("tokens/s", f"{speed_text}; {per_chip} a chip"),
        ("MFU", f"{mfu} (6N + 12LCT, causal not halved)"),
        ("sections", ", ".join(sections)),
        *remedy,
    ]


def _format_range(
    values: Range, middle: float, format_value: Callable[[float], str]
) -> str:
    low, high = format_value(values.low), format_value(values.high)
    return f"{low} to {high}, middle {format_value(middle)}"
