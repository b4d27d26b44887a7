"""Name the bottleneck of a predicted step, and the override that relieves it."""

from collections.abc import Iterable
from dataclasses import dataclass

from data.config import DataConfig
from model.config import ModelConfig
from train.config import TrainConfig
from train.console import print_table
from train.plan.cost import ACTIVATION_AXES, COMPILED
from train.plan.rates import FAR, PCIE, Link
from train.plan.recomputing import format_policy, policies_keeping_more
from train.plan.roofline import Prediction
from train.units import format_bytes, format_count, format_seconds

# The advice names recomputation, exposed collectives and dims only beyond these limits.
_MUCH_RECOMPUTED = 1.1  # executed over model FLOPs
_MUCH_EXPOSED = 0.1  # fraction of the step
_LOW_FILL = 0.9  # fraction of the matrix units that the model's dims fill


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
    prediction: Prediction, *, model: ModelConfig, data: DataConfig, train: TrainConfig
) -> Advice:
    """Return the bottleneck of a config's step and a remedy."""

    def share(seconds: float) -> str:
        fraction = seconds / prediction.middle.step_s
        return f"{format_seconds(seconds)} ({fraction:.0%}) of the step"

    link = max(prediction.links, key=lambda link: link.seconds, default=None)
    if link and link.seconds > max(prediction.products, prediction.memory):
        bottleneck = f"bound by the network: {link.name} at "
        bottleneck += f"{link.bandwidth / 1e9:,.1f} GB/s a device takes "
        bottleneck += share(link.seconds)
        return _for_less_traffic(bottleneck, data, train, link=link)
    if prediction.memory > prediction.products:
        bottleneck = "bound by main memory: reading and writing takes "
        bottleneck += f"{share(prediction.memory)}, if no cache helps"
        return _for_less_traffic(bottleneck, data, train)
    bottleneck = "bound by computing: matrix products take "
    bottleneck += share(prediction.products)
    policies = policies_keeping_more(model, train)
    if policies and prediction.recomputed > _MUCH_RECOMPUTED:
        bottleneck += f", {prediction.recomputed:.2f} x what the model needs"
        change = "recompute less, if the saved activations fit"
        return Advice(bottleneck, change, f"train.remat={format_policy(policies[0])}")
    exposed_s = sum(link.exposed for link in prediction.links)
    if exposed_s > _MUCH_EXPOSED * prediction.middle.step_s:
        link = max(prediction.links, key=lambda link: link.exposed)
        bottleneck += "; collectives that no product overlaps take "
        bottleneck += f"{share(exposed_s)}, most of it {link.name}"
        return _for_less_traffic(bottleneck, data, train, link=link)
    change = "little is left to gain on these chips; use more or faster chips"
    if prediction.fill < _LOW_FILL:
        bottleneck += f"; the model's dims fill {prediction.fill:.0%} of matrix units"
        change = "make dims multiples of a matrix unit's rows, the head dim first"
    return Advice(bottleneck, change)


def _for_less_traffic(
    bottleneck: str, data: DataConfig, train: TrainConfig, *, link: Link | None = None
) -> Advice:
    """Return advice that moves fewer bytes over `link`, or through main memory."""
    axes = {*link.axes} if link else set()
    if link and link.network == PCIE:
        key = "train.offload=[]" if train.offload else "optimizer.offload=false"
        return Advice(bottleneck, "keep more in the device's memory, if it fits", key)
    spans_domains = link and link.network in FAR and axes != {"data"}
    if spans_domains or axes & ACTIVATION_AXES or train.accumulation_steps > 1:
        change = "search for a mesh and microbatches that move less"
        return Advice(bottleneck, change, "search=true")
    change = "give each chip more tokens, if they fit: the traffic of parameters and "
    change += "gradients does not grow with them"
    return Advice(bottleneck, change, f"data.batch_size={2 * data.batch_size}")


def _judgement(prediction: Prediction) -> str:
    """Return which published runs the range of a prediction includes."""
    if prediction.judged is None:
        return "no published run on this chip was compared"
    if prediction.platform == "tpu" and prediction.how != COMPILED:
        return "only compiled steps were compared with published runs on this chip"
    return "the range includes every published run on this chip that was compared"


def print_prediction(prediction: Prediction, advice: Advice) -> None:
    """Print the time of each resource, the predicted range and the advice."""
    rows = [
        ["matrix products", format_seconds(prediction.products), ""],
        ["main memory", format_seconds(prediction.memory), ""],
    ]
    for link in prediction.links:
        hidden = f"{link.hidden / link.seconds:.0%}" if link.seconds else ""
        rows.append([link.name, format_seconds(link.seconds), hidden])
    title = f"time of a step by resource ({prediction.how})"
    print_table(rows, ["resource", "busy", "overlapped"], title)
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

    middle = prediction.middle
    step_s = prediction.step_s
    low = format_seconds(step_s.low)
    high = format_seconds(step_s.high)
    step = f"{format_seconds(middle.step_s)} for a step ({low} to {high}), estimated; "
    step += _judgement(prediction)
    per_chip = f"{format_count(middle.tokens_per_second_per_chip)} a chip"
    sections = (f"{s.name}: {s.bound_by}" for s in prediction.sections)
    return [
        ("predicted", step),
        ("tokens/s", f"{format_count(middle.tokens_per_second)}; {per_chip}"),
        ("MFU", f"{middle.mfu:.0%} (6N + 12LCT, causal not halved)"),
        ("sections", ", ".join(sections)),
        *remedy,
    ]
