"""Count the FLOPs of a compiled program.

Matrix products are counted in fusions, loops (once for each trip) and kernels. The
FLOPs of a kernel follow from the shapes of its operands.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from train.plan.compiled.hlo import Executed, HloArray, Instruction
from train.plan.cost import (
    CUDNN_PRODUCTS,
    SPLASH_PRODUCTS,
    Flops,
    causal_blocks,
    computed_blocks,
    expected_fraction,
)

_FLOATS = ("f", "bf")
# The shape [B, N, T, S] of the scores (jax/_src/cudnn/fused_attention_stablehlo.py).
_SCORES = r'"intermediate_tensor_shape": ?\{[^}]*?"dimensions": ?\[([^\]]*)\]'
_CUBLAS = 'custom_call_target="__cublas$lt$matmul'


class AttentionFlops(NamedTuple):
    """The FLOPs of an attention kernel.

    full: the FLOPs if every query attended to every key.
    computed: the FLOPs of the blocks that the kernel does not skip.
    """

    full: float
    computed: float


def count_flops(all_executed: Iterable[Executed]) -> Flops:
    """Return the FLOPs of instructions by kind, and the kernels of unknown FLOPs."""
    products = attention = whole_attention = eight_bits = grouped = 0.0
    unknown = set[str]()
    for executed in all_executed:
        for inner in executed.instruction.with_nested:
            flops = executed.count * product_flops(inner)
            products += flops
            if flops and has_eight_bits(inner):
                eight_bits += flops
            if is_grouped(inner):
                grouped += flops
            kernel = attention_kernel_flops(inner)
            attention += executed.count * kernel.computed
            whole_attention += executed.count * kernel.full
            if not flops and not kernel.full and may_multiply(inner):
                unknown.add(inner.target)
    return Flops(
        products,
        attention,
        whole_attention,
        unknown=tuple(sorted(unknown)),
        eight_bits=eight_bits,
        grouped=grouped,
    )


def multiplies(instruction: Instruction) -> bool:
    """Return whether an instruction, or one fused into it, multiplies matrices."""
    return any(
        inner.opcode in ("dot", "convolution")
        or attention_kernel_flops(inner).full
        or product_flops(inner)
        for inner in instruction.with_nested
    )


def sum_flops(instructions: Iterable[Instruction]) -> float:
    """Count the FLOPs of instructions, including loops and called computations."""
    return sum(map(_instruction_flops, instructions))


def _instruction_flops(instruction: Instruction) -> float:
    if instruction.opcode == "while":
        return instruction.loop.trips * sum_flops(instruction.body.order)
    total = product_flops(instruction) + attention_kernel_flops(instruction).computed
    return total + sum(sum_flops(called.order) for called in instruction.called)


def product_flops(instruction: Instruction) -> float:
    """Count the FLOPs of a dot, a convolution or a grouped product; 0 for others."""
    if instruction.opcode == "dot" or _CUBLAS in instruction.attributes:
        lhs = instruction.operands[0].arrays[0]
        dims = r'"lhs_contracting_dimensions":\[([\d",]*)\]'
        if instruction.opcode == "dot":
            dims = r" lhs_contracting_dims=\{([\d,]*)\}"
        contracted = re.findall(r"\d+", instruction.find(dims))
        depth = math.prod(lhs.dims[int(dim)] for dim in contracted)
        return 2.0 * math.prod(instruction.arrays[0].dims) * depth
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction)
    if is_grouped(instruction):
        return _grouped_flops(instruction)
    return 0.0


def has_eight_bits(instruction: Instruction) -> bool:
    """Return whether all operands of a product have eight bits."""
    arrays = multiplied_arrays(instruction)
    return all(array.dtype.startswith(("f8", "s8")) for array in arrays)


def multiplied_arrays(instruction: Instruction) -> list[HloArray]:
    """Return the arrays that a product or attention kernel multiplies, otherwise [].

    Omits the scales and addends of a cuBLAS call, and the integer operands of a kernel,
    such as masks and the number of rows of each expert.
    """
    is_product = product_flops(instruction) > 0
    if not is_product and not attention_kernel_flops(instruction).full:
        return []
    arrays = _operand_arrays(instruction)
    if instruction.opcode == "custom-call" and _CUBLAS not in instruction.attributes:
        arrays = _float_arrays(arrays)
    return arrays[:2] if is_product else arrays


def _operand_arrays(instruction: Instruction) -> list[HloArray]:
    return [array for operand in instruction.operands for array in operand.arrays[:1]]


def _float_arrays(arrays: Iterable[HloArray]) -> list[HloArray]:
    return [array for array in arrays if array.dtype.startswith(_FLOATS)]


def is_grouped(instruction: Instruction) -> bool:
    """Return whether an instruction is a grouped product (model/experts/grouped.py)."""
    return instruction.opcode == "custom-call" and "(grouped_" in instruction.op_name


def _grouped_flops(instruction: Instruction) -> float:
    """Count the FLOPs of a grouped product over the rows that are used on average.

    A row is used if it belongs to one of the device's experts. The operation's name
    states the fraction of rows that are used if all experts have the same load
    (`expected_scope`).
    """
    if not may_multiply(instruction):
        return 0.0
    rows, *_ = _float_arrays(_operand_arrays(instruction))
    flops = 2.0 * math.prod(rows.dims) * instruction.arrays[0].dims[-1]
    return flops * expected_fraction(instruction.op_name)


def _convolution_flops(instruction: Instruction) -> float:
    """Count a convolution's FLOPs, except products with padding or dilation zeros.

    Source: HloCostAnalysis::HandleConvolution in openxla/xla.
    """
    lhs, rhs = (operand.arrays[0].dims for operand in instruction.operands[:2])
    labels = re.split("_|->", instruction.find(r" dim_labels=([\w>-]+)"))
    window = instruction.find(r" window=\{([^}]*)\}")
    fields = dict(item.split("=") for item in window.split())
    rank = len(labels[0]) - 2

    def field_values(key: str, default: str = "1") -> list[str]:
        return fields.get(key, "x".join([default] * rank)).split("x")

    pairs = 1
    for dim in range(rank):
        size, stride, lhs_dilate, rhs_dilate = (
            int(field_values(key)[dim])
            for key in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(field_values("pad", "0_0")[dim].split("_")[0])
        num_outputs = instruction.arrays[0].dims[labels[2].index(str(dim))]
        positions = np.arange(num_outputs)[:, None] * stride - low
        positions = positions + np.arange(size) * rhs_dilate
        end = (lhs[labels[0].index(str(dim))] - 1) * lhs_dilate + 1
        is_input = (positions >= 0) & (positions < end) & (positions % lhs_dilate == 0)
        pairs *= int(np.sum(is_input))
    groups = int(instruction.find(r" batch_group_count=(\d+)") or 1)
    features = rhs[labels[1].index("i")] * rhs[labels[1].index("o")]
    return 2.0 * pairs * features * lhs[labels[0].index("b")] / groups


def attention_kernel_flops(instruction: Instruction) -> AttentionFlops:
    """Count the FLOPs of an attention kernel; zero for other instructions.

    Splash skips whole blocks above the diagonal and outside of a window. The
    operation's name tells how many (`computed_scope`); otherwise, for causal masks, the
    shape of the mask does. A causal cuDNN kernel is assumed to compute half of the
    scores, or the scores inside its window. cuDNN's operands may have heads before or
    after positions, so the sizes are read from the shape of the scores.
    """
    if instruction.opcode != "custom-call":
        return AttentionFlops(0.0, 0.0)
    target, arrays = instruction.target, _operand_arrays(instruction)
    if target.startswith("__cudnn$fmha"):
        scores = instruction.find(_SCORES)
        B, N, T, S = map(int, re.findall(r"\d+", scores))
        H = arrays[0].dims[-1]
        full = 2.0 * CUDNN_PRODUCTS["Backward" in target] * B * N * T * S * H
        if not instruction.find(r'"mask_type": ?"(?:PADDING_)?(CAUSAL)"'):
            return AttentionFlops(full, full)
        window = int(instruction.find(r'"sliding_window_length": ?(\d+)') or 0)
        fraction = (T * window - window * (window - 1) / 2) / (T * S) if window else 0.5
        return AttentionFlops(full, full * fraction)
    for name, num_products in SPLASH_PRODUCTS.items():
        if target == "tpu_custom_call" and name in instruction.op_name:
            q, k = _float_arrays(arrays)[:2]
            batch_heads = math.prod(q.dims[:-2])
            num_scores = batch_heads * q.dims[-2] * k.dims[-2]
            full = 2.0 * num_products * num_scores * q.dims[-1]
            masks = [a.dims for a in arrays if a.dtype == "s8" and len(a.dims) == 3]
            causal_counts = causal_blocks(masks[0][-2:]) if masks else (1, 1)
            stated_counts = computed_blocks(instruction.op_name)
            computed, blocks = stated_counts or causal_counts
            return AttentionFlops(full, full * (computed / blocks))
    return AttentionFlops(0.0, 0.0)


def may_multiply(instruction: Instruction) -> bool:
    """Return whether a custom call may multiply matrices."""
    prefixes = ("tpu_custom_call", "__gpu$xla.gpu.triton", "__cu", "__triton")
    is_call = instruction.opcode == "custom-call"
    return is_call and instruction.target.startswith((*prefixes, "__onednn"))


def is_attention(instruction: Instruction) -> bool:
    """Return whether an instruction is an attention kernel."""
    return attention_kernel_flops(instruction).full > 0
