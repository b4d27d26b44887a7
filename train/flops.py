"""Model FLOPs of training.

Convention: a token costs 6 N + 12 L C T, N being the parameters that multiply (matrices
and the head, tied or not; no embedding look-ups, no vectors) and C = heads x head dim;
causal attention is not halved. Source: PaLM, arXiv:2204.02311, appendix B.
"""

from typing import Any

from model.config import ModelConfig
from model.params import Kind, is_info, named


def flops_per_token(model: ModelConfig, params: Any, infos: Any, length: int) -> float:
    """Count the model FLOPs of one trained token in rows of `length` tokens."""
    multiplying = 0
    info_of = dict(named(infos, is_info))
    for name, param in named(params):
        head = name == "head.weight" or (name == "embedding.weight" and model.tied_head)
        if info_of[name].kind is Kind.matrix or head:
            multiplying += info_of[name].size(param.shape)
    width = model.num_heads * model.head_size
    return 6 * multiplying + 12 * model.num_layers * width * length
