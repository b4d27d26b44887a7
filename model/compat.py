"""Private functions of JAX that the model needs without a kernel.

They were checked with jax 0.10.2 and 0.12.0. model/parts/kernels/compat.py has those
that kernels call.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src.cudnn import fused_attention_stablehlo as fused

# Rematerialisation policies recognise cuDNN's attention by this name of its primitive,
# because jax does not name the primitive's results.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"


@contextmanager
def checks_for_gpu(compute_capability: str) -> Iterator[None]:
    """Check calls of cuDNN's attention for a GPU that may not be present.

    Without this context, jax asks the backend of this process, and refuses head dims
    above 128 if that is a CPU.
    """
    original = fused.check_compute_capability

    def is_at_least(required: str) -> bool:
        return float(compute_capability) >= float(required)

    fused.check_compute_capability = is_at_least
    try:
        yield
    finally:
        fused.check_compute_capability = original


@functools.cache  # A second call changes nothing.
def make_cudnn_deterministic() -> None:
    """Choose cuDNN's reproducible backward pass in every program lowered from now on.

    This must go with `--xla_gpu_deterministic_ops=true`, and only with it. That flag
    makes XLA (jaxlib 0.11.2) choose the same kernel, but XLA changes only the first of
    several equal calls, such as those of an unrolled model. The others then have no
    kernel, and the step fails with "IndexError: raw_hash_map<>::at".

    Source: openxla/xla, xla/backends/gpu/transforms/cudnn_custom_call_compiler.cc.
    """
    make_config = fused.create_dot_product_attention_backend_config_base

    def make_deterministic_config(*arguments: Any) -> dict[str, Any]:
        config = make_config(*arguments)
        is_backward = arguments[-1]
        if is_backward:
            config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return config

    fused.create_dot_product_attention_backend_config_base = make_deterministic_config
