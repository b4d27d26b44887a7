"""Model FLOPs: what a token needs by convention, however a step computes it.

A token costs 6 N + 12 L C T, N being the parameters that multiply (matrices and the
head, tied or not; no embedding look-ups, no vectors; of experts those that a token
takes) and C = heads x head dim; causal attention is not halved. Of a layer with a
window T is min(T, window). Source: PaLM, arXiv:2204.02311, appendix B.
"""

from typing import Any

from model.config import ModelConfig
from model.gpt import taken
from model.params import Kind, is_info, named


def weight_flops(model: ModelConfig, params: Any, infos: Any) -> int:
    """Return 6 N: the FLOPs of a token's products with weights.

    Args:
        model: with its vocabulary settled.
        params: of the model, arrays or their shapes.
        infos: what each parameter is, in a tree like `params`.
    """
    by_name = dict(named(infos, is_info))
    head = "embedding.weight" if model.tied_head else "head.weight"
    multiplying = sum(
        by_name[name].size(param.shape) * taken(by_name[name], model)
        for name, param in named(params)
        if by_name[name].kind is Kind.matrix or name == head
    )
    return 6 * (multiplying // model.num_experts)


def attention_flops(model: ModelConfig, length: int) -> int:
    """Return 12 L C T: the FLOPs of a token's attention in rows of a length."""
    keys = sum(min(length, window or length) for window in model.windows)
    return 12 * model.num_heads * model.head_size * keys
