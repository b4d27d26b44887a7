"""Model FLOPs: the conventional cost of a token, whatever a step really executes.

A token costs 6 N + 12 L C T. N is the number of parameters in matrix products: the
matrices and the head, tied or not, but no embedding look-ups or vectors. The head
counts again for each module that predicts a token further ahead. Only experts to
which a token is routed count. C is heads x head dim, the mean of the dims of keys and
values, and T is at most the window of a layer. Causal attention is not halved.
Source: PaLM, arXiv:2204.02311, appendix B.

A mixer that does not attend takes something else instead of 12 C T, as its record says
(`MixerKind.flops`).
"""

from collections.abc import Mapping
from typing import Any

from model.config import ModelConfig
from model.count import active_parts
from model.mixer_kind import MixerKind
from model.params import Kind, is_info, named


def weight_flops(model: ModelConfig, params: Any, infos: Any) -> int:
    """Return 6 N: the FLOPs of a token's products with weights.

    Args:
        model: the model's config, with its vocabulary size set.
        params: tree of the model's parameters, as arrays or shapes.
        infos: tree of `ParamInfo`, shaped like `params`.
    """
    by_name = dict(named(infos, is_info))
    head = "embedding.weight" if model.tied_head else "head.weight"
    num_multiplying = sum(
        by_name[name].size(param.shape)
        * active_parts(by_name[name], model)
        * (1 + model.predict_ahead if name == head else 1)
        for name, param in named(params)
        if by_name[name].kind is Kind.matrix or name == head
    )
    return 6 * (num_multiplying // model.num_experts)


def mixer_flops(
    model: ModelConfig, mixers: Mapping[str, MixerKind], length: int
) -> int:
    """Return 12 C T, or what other mixers take, summed over layers.

    `mixers` are the records of mixers, and `length` is the length of rows.
    """
    ahead = model.predict_ahead
    windows = *model.windows, *[model.windows[-1]] * ahead
    names = *model.mixers, *[model.mixers[-1]] * ahead
    return sum(
        mixers[name].flops(model, window, length)
        for name, window in zip(names, windows, strict=True)
    )
