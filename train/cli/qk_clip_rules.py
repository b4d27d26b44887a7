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
    reasons = (
        (
            "model.qk_norm",
            model.qk_norm,
            "normalizes queries and keys, so that smaller weights change no score",
        ),
        (
            "model.attention_soft_cap",
            model.attention_soft_cap is not None,
            "already caps the scores",
        ),
        (
            "model.attention_sinks",
            model.attention_sinks,
            "adds a key whose score does not depend on the clipped weights",
        ),
        (
            "model.predict_ahead",
            model.predict_ahead > 0,
            "adds attention that is not clipped",
        ),
        (
            "model.mixer",
            {*model.mixers} == {Mixer.gated_delta},
            "has no scores in any layer",
        ),
        (
            "optimizer.offload",
            config.optimizer.offload,
            "updates layers one by one, while all layers are clipped together",
        ),
    )
    for key, is_set, reason in reasons:
        if is_set:
            rule = f"must be null with {key}, which {reason}; change one of them"
            yield Mistake("optimizer.qk_clip", threshold, rule, (key,))
