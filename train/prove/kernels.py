"""Compare kernels of attention, norms and experts with plain formulas, on one device.

The shapes are those of the run, with fewer rows, heads and experts.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data.config import DataConfig
from model.attention.inputs import Inputs
from model.attention.method import PLAIN_ATTENTION, AttentionMethod, AttentionOptions
from model.choices import Grouped, Norm
from model.config import ModelConfig
from model.execution import Execution
from model.layers import Normalize
from model.parts.experts.grouped import grouped_product
from train.errors import NOT_PROVED, Exit
from train.prove.parity import ArrayDifference, Key, relative_error

_TOLERANCE = 2e-2  # Operands and results have eight bits of precision in bfloat16.
_MAX_LENGTH = 8192  # Scores of longer rows do not fit into memory.
_ROWS = 1
_MAX_QUERY_HEADS = 2
_NORM_ROWS = 1000
_EXPERT_ROWS = 1024
_MAX_EXPERTS = 4


def check_kernels(
    model: ModelConfig, data: DataConfig, execution: Execution
) -> Mapping[str, str]:
    """Compare the kernels on a local device, or raise Exit with NOT_PROVED."""
    differences = compare_kernels(model, data, execution)
    if failures := [difference for difference in differences if difference.is_wrong]:
        text = "\n  ".join(["Kernels differ from plain formulas:", *map(str, failures)])
        remedy = "Update jax and the driver, or choose slower operations of XLA: "
        remedy += "model.attention=xla, and runtime.gpu_tuning=false for norms."
        raise Exit(NOT_PROVED, f"{text}\n{remedy}")
    return {}


def compare_kernels(
    model: ModelConfig, data: DataConfig, execution: Execution
) -> list[ArrayDifference]:
    """Return how much results and gradients of the run's kernels are off.

    Attention is compared with each window that a layer has. Operands of the plain
    formulas are the same rounded numbers, and their products are in float32. The
    kernels run on JAX's default device.
    """
    rng = np.random.default_rng(0)
    differences = list[ArrayDifference]()
    for window in dict.fromkeys(model.windows):
        differences += _compare_attention(
            model, data, execution=execution, window=window, rng=rng
        )
    if execution.normalize is not None:
        differences += _compare_norm(model, execution, rng)
    if model.expert_layers:
        for swapped in (False, True):
            differences += _compare_experts(model, execution, swapped, rng)
    return differences


def _compare_attention(
    model: ModelConfig,
    data: DataConfig,
    *,
    execution: Execution,
    window: int | None,
    rng: np.random.Generator,
) -> Iterator[ArrayDifference]:
    """Yield the differences of attention over documents of several lengths."""
    dtype = execution.numerics.compute_dtype
    T = min(data.sequence_length, _MAX_LENGTH)
    H = model.head_size
    V = model.value_size
    N = min(_MAX_QUERY_HEADS, model.num_heads // model.kv_heads)
    ids_BT = None
    if data.document_mask:
        is_start_BT = rng.random((_ROWS, T)) < 8 / T
        ids_BT = jnp.cumsum(jnp.asarray(is_start_BT, jnp.int32), axis=1) + 1
    dims = (N, H), (1, H), (1, V), (N, V)
    q, k, v, dy = (_normal(rng, (_ROWS, T, *pair), dtype) for pair in dims)
    sinks_N = _normal(rng, (N,), jnp.float32) if model.attention_sinks else None

    def attend(method: AttentionMethod, *operands: jax.Array) -> jax.Array:
        q, k, v, sinks_N = operands
        scaled_q = q if method.scales_queries else (q * H**-0.5).astype(q.dtype)
        return method.attend(
            Inputs(scaled_q, k, v, ids_BT, sinks_N),
            AttentionOptions(q.dtype, window=window, soft_cap=model.attention_soft_cap),
        ).o_BTNV

    name = f"{execution.attention.kernel} attention, window {window or 'none'}:"
    run = partial(attend, execution.attention)
    plain = partial(attend, PLAIN_ATTENTION)
    operands = {"queries": q, "keys": k, "values": v, "sinks": sinks_N}
    yield from _compare(name, run, plain, operands, dy)


def _compare_norm(
    model: ModelConfig, execution: Execution, rng: np.random.Generator
) -> Iterator[ArrayDifference]:
    """Yield the differences of a norm of the layers' inputs, and of the kept input."""
    D = model.embed_dim
    dtype = execution.numerics.activation_dtype
    x, dx, dy = (_normal(rng, (_ROWS, _NORM_ROWS, D), dtype) for _ in range(3))
    has_bias = model.norm is Norm.layernorm and model.bias
    scale, bias = (_normal(rng, (D,), jnp.float32) for _ in range(2))

    def normalize(
        execution: Execution, x: jax.Array, scale: jax.Array, bias: jax.Array | None
    ) -> jax.Array:
        norm = Normalize(model, model.norm, embed=D)
        norm.scale[...] = scale
        if norm.bias is not None:
            norm.bias[...] = bias
        return jnp.concatenate(norm.keep_input(x, execution), axis=-1)

    kernel = partial(normalize, Execution(normalize=execution.normalize))
    plain = partial(normalize, Execution())
    operands = {"rows": x, "scale": scale, "bias": bias if has_bias else None}
    dresults = jnp.concatenate([dx, dy], axis=-1)
    yield from _compare(f"norm of {D} dims:", kernel, plain, operands, dresults)


def _compare_experts(
    model: ModelConfig, execution: Execution, swapped: bool, rng: np.random.Generator
) -> Iterator[ArrayDifference]:
    """Yield the differences of products of rows, grouped by expert."""
    dtype = execution.numerics.compute_dtype
    D = model.embed_dim
    F = model.expert_size
    E = min(model.num_experts, _MAX_EXPERTS)
    if swapped:  # the product of `down`
        D, F = F, D
    x, dy = (_normal(rng, (_EXPERT_ROWS, n), dtype) for n in (D, F))
    w = _normal(rng, (E, D, F), dtype) * jnp.asarray(D**-0.5, dtype)
    # The first expert has no rows, and the last rows belong to no expert.
    shares_E = np.arange(E) / max(1, E * (E - 1) / 2)
    sizes_E = jnp.asarray(rng.multinomial(_EXPERT_ROWS * 7 // 8, shares_E), jnp.int32)

    def multiply(kernel: Grouped, x: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_product(x, w, sizes_E, x.dtype, kernel, swapped=swapped)

    name = f"{execution.grouped} products of experts, {D} x {F}:"
    run, plain = (partial(multiply, k) for k in (execution.grouped, Grouped.scan))
    yield from _compare(name, run, plain, {"rows": x, "matrices": w}, dy)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def _compare(
    name: str,
    kernel: Callable[..., jax.Array],
    plain: Callable[..., jax.Array],
    operands: Mapping[str, jax.Array | None],
    dy: jax.Array,
) -> Iterator[ArrayDifference]:
    """Yield the differences of a kernel's result, and of its gradients, from a formula.

    `dy` is the gradient of the result. The operands of `plain` are float32.
    """

    def run(function: Callable[..., jax.Array], dy: Any, operands: Any) -> Any:
        y, backward = jax.vjp(function, *operands)
        return y, *backward(dy.astype(y.dtype))

    arrays = [*operands.values()]
    actual = jax.jit(partial(run, kernel))(dy, arrays)
    with jax.default_matmul_precision("highest"):
        dy, arrays = jax.tree.map(lambda x: x.astype(jnp.float32), (dy, arrays))
        expected = jax.jit(partial(run, plain))(dy, arrays)
    names = ("result", *(f"gradient of {operand}" for operand in operands))
    for part, x, y in zip(names, actual, expected, strict=True):
        if y is not None:
            error = relative_error(np.asarray(x, np.float32), np.asarray(y))
            yield ArrayDifference(Key("kernel", f"{name} {part}"), error, _TOLERANCE)
