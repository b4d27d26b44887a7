"""The rules of `optimizer.qk_clip`."""

import math
from collections.abc import Iterator

from model.choices import Mixer
from train.config import Config
from train.errors import Mistake


def qk_clip_mistakes(config: Config) -> Iterator[Mistake]:
    """Yield mistakes in `optimizer.qk_clip`: settings that it does not go with."""
    threshold, model = config.optimizer.qk_clip, config.model
    if threshold is None:
        return
    length = config.data.sequence_length
    if threshold <= math.log(length):
        rule = f"must be above {math.log(length):.3g}, the log-sum-exp of scores of 0 "
        rule += f"with data.sequence_length={length}; take 100"
        related = ("data.sequence_length",)
        yield Mistake("optimizer.qk_clip", threshold, rule, related)
    reasons = {
        "model.qk_norm": model.qk_norm and "fixes the size of queries and keys",
        "model.attention_soft_cap": model.attention_soft_cap and "caps the scores",
        "model.attention_sinks": model.attention_sinks
        and "adds scores that do not depend on queries and keys",
        "model.predict_ahead": model.predict_ahead
        and "adds attention that is not clipped",
        "model.mixer": {*model.mixers} == {Mixer.gated_delta}
        and "gives no layer scores",
        "optimizer.offload": config.optimizer.offload
        and "updates layers one by one, while all layers are clipped together",
    }
    for key, reason in reasons.items():
        if reason:
            rule = f"must be null with {key}, which {reason}; change one of them"
            yield Mistake("optimizer.qk_clip", threshold, rule, (key,))
