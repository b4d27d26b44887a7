"""Model FLOPs, and what a chip could do: the two sides of MFU.

Convention: a token costs 6 N + 12 L C T, N being the parameters that multiply (matrices
and the head, tied or not; no embedding look-ups, no vectors) and C = heads x head dim;
causal attention is not halved. Source: PaLM, arXiv:2204.02311, appendix B.
"""

import math
from typing import Any

from model.config import ModelConfig
from model.params import Kind, named

# Dense bfloat16 FLOP/s of one JAX device, by a part of its `device_kind`, longest
# first. Source: the vendors' datasheets (no sparsity). A v2 or v3 device is a core.
PEAK_FLOPS = (
    ("TPU v5 lite", 197e12),
    ("TPU v6 lite", 918e12),
    ("TPU v5p", 459e12),
    ("TPU7x", 1153.5e12),  # half of a two-die chip's 2,307
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
    ("TPU v3", 61.5e12),
    ("TPU v2", 23e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200", 989.5e12),
    ("H100", 989.5e12),
    ("A100", 312e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Look up bfloat16 FLOP/s of one device, None where unknown (any CPU)."""
    return next((peak for part, peak in PEAK_FLOPS if part in device_kind), None)


def flops_per_token(model: ModelConfig, params: Any, infos: Any, length: int) -> float:
    """Count the model FLOPs of one trained token in rows of `length` tokens."""
    multiplying = 0
    kinds = dict(named(infos, lambda x: hasattr(x, "kind")))
    for name, param in named(params):
        head = name == "head.weight" or (name == "embedding.weight" and model.tied_head)
        if kinds[name].kind is Kind.matrix or head:
            multiplying += math.prod(param.shape)
    width = model.num_heads * model.head_size
    return 6 * multiplying + 12 * model.num_layers * width * length
