"""The rules of QK-clip, and of rates that are those of another model or run."""

import math
from collections.abc import Iterator

from data.config import DataConfig
from data.errors import Mistake
from model.config import ModelConfig
from model.mixer_catalog import kinds_of
from train.config import OptimizerConfig, OptimizerName, ScheduleConfig, Transfer


def qk_clip_mistakes(
    optimizer: OptimizerConfig, *, model: ModelConfig, data: DataConfig
) -> Iterator[Mistake]:
    """Yield mistakes in `optimizer.qk_clip`: settings that it does not go with."""
    threshold = optimizer.qk_clip
    if threshold is None:
        return
    length = data.sequence_length
    if threshold <= math.log(length):
        rule = f"must be above {math.log(length):.3g}, the log-sum-exp of scores of 0 "
        rule += f"with data.sequence_length={length}; take 100"
        related = ("data.sequence_length",)
        yield Mistake("optimizer.qk_clip", threshold, rule, related)
    no_scores = not any(kinds_of(model)[mixer].attends for mixer in model.mixers)
    offload = "optimizer.offload"
    by_layer = "updates layers one by one, while all layers are clipped together"
    sinks = "adds scores that do not depend on queries and keys"
    for key, is_set, reason in (
        ("model.qk_norm", model.qk_norm, "fixes the size of queries and keys"),
        ("model.attention_soft_cap", model.attention_soft_cap, "caps the scores"),
        ("model.attention_sinks", model.attention_sinks, sinks),
        ("model.predict_ahead", model.predict_ahead, "has attention without clipping"),
        ("model.mixer", no_scores, "gives no layer scores"),
        (offload, optimizer.offload, by_layer),
    ):
        if is_set:
            rule = f"must be null with {key}, which {reason}; change one of them"
            yield Mistake("optimizer.qk_clip", threshold, rule, (key,))


def transfer_mistakes(
    optimizer: OptimizerConfig, *, schedule: ScheduleConfig, num_steps: int
) -> Iterator[Mistake]:
    """Yield mistakes in `optimizer.transfer` and `optimizer.base_*`."""
    name = optimizer.name
    transfer = optimizer.transfer
    if transfer is not Transfer.none:
        if name is OptimizerName.adafactor:
            rule = "must be none with optimizer.name=adafactor, whose updates follow "
            rule += "the size of the weights"
            yield Mistake("optimizer.transfer", transfer, rule, ("optimizer.name",))
        for key, size in (("base_width", "embed_dim"), ("base_depth", "num_layers")):
            if getattr(optimizer, key) is None:
                rule = f"must be the model.{size} of the model whose rates are given"
                yield Mistake(f"optimizer.{key}", None, rule, ("optimizer.transfer",))
    if (base_steps := optimizer.base_steps) is None:
        return
    if schedule.base_batch_tokens is not None:
        rule = "must be null with schedule.base_batch_tokens: both change rates if a "
        rule += "batch grows"
        related = ("schedule.base_batch_tokens",)
        yield Mistake("optimizer.base_steps", base_steps, rule, related)
    if name is not OptimizerName.adamw:
        rule = f"must be null with optimizer.name={name}; its rule is for adamw"
        yield Mistake("optimizer.base_steps", base_steps, rule, ("optimizer.name",))
    elif (1 - min(optimizer.b1, optimizer.b2)) * base_steps > num_steps:
        rule = f"would make a beta negative with train.num_steps={num_steps}; train "
        rule += "for more steps, with smaller batches"
        related = ("optimizer.b1", "optimizer.b2", "train.num_steps")
        yield Mistake("optimizer.base_steps", base_steps, rule, related)
