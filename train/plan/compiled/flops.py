"""FLOPs of a compiled program.

Those of matrix products wherever they stand: in fusions, in loops (times their trips),
in attention kernels by the shapes of their operands.
"""

import math
import re
from collections.abc import Iterable

import numpy as np

from train.plan.compiled.hlo import HloArray, Instruction, Module
from train.plan.cost import (
    CUDNN_PRODUCTS,
    SPLASH_PRODUCTS,
    Flops,
    causal_blocks,
    computed_blocks,
    expected_part,
)

_FLOATS = ("f", "bf")
# jax/_src/cudnn/fused_attention_stablehlo.py: of the scores, [B, N, T, S].
_SCORES = r'"intermediate_tensor_shape": ?\{[^}]*?"dimensions": ?\[([^\]]*)\]'
_CUBLAS = 'custom_call_target="__cublas$lt$matmul'


def count_flops(module: Module) -> Flops:
    """Add up a program."""
    products = attention = whole = eight_bits = grouped = 0.0
    unknown = set[str]()
    for executed in module.executed:
        for inner in executed.instruction.with_nested:
            flops = executed.times * product_flops(inner)
            products += flops
            if flops and has_eight_bits(inner):
                eight_bits += flops
            if is_grouped(inner):
                grouped += flops
            if inner.opcode == "custom-call":
                flops, share = attention_kernel_flops(inner)
                attention += executed.times * flops * share
                whole += executed.times * flops
                if not flops and not product_flops(inner) and is_kernel(inner):
                    unknown.add(inner.target)
    names = tuple(sorted(unknown))
    return Flops(products, attention, whole, names, eight_bits, grouped)


def multiplies(instruction: Instruction) -> bool:
    """Tell whether an instruction, or what it holds, multiplies matrices."""
    return any(
        inner.opcode in ("dot", "convolution")
        or (inner.opcode == "custom-call" and attention_kernel_flops(inner)[0])
        or product_flops(inner)
        for inner in instruction.with_nested
    )


def computed_flops(instructions: Iterable[Instruction]) -> float:
    """Count the FLOPs of some instructions, with what they hold, loop over or call."""
    return sum(map(_flops, instructions))


def _flops(instruction: Instruction) -> float:
    if instruction.opcode == "while":
        return instruction.loop.trips * computed_flops(instruction.body.order)
    total = product_flops(instruction)
    if instruction.opcode == "custom-call":
        total += math.prod(attention_kernel_flops(instruction))
    return total + sum(computed_flops(called.order) for called in instruction.called)


def product_flops(instruction: Instruction) -> float:
    """Count the FLOPs of a dot, a convolution, or rows grouped by expert; else 0."""
    if instruction.opcode == "dot" or _CUBLAS in instruction.attributes:
        left = instruction.operands[0].arrays[0]
        dims = r'"lhs_contracting_dimensions":\[([\d",]*)\]'
        if instruction.opcode == "dot":
            dims = r" lhs_contracting_dims=\{([\d,]*)\}"
        contracted = re.findall(r"\d+", instruction.find(dims))
        inner = math.prod(left.dims[int(dim)] for dim in contracted)
        return 2.0 * math.prod(instruction.arrays[0].dims) * inner
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction)
    if is_grouped(instruction):
        return _grouped_flops(instruction)
    return 0.0


def has_eight_bits(instruction: Instruction) -> bool:
    """Tell whether the operands of a product have eight bits."""
    arrays = multiplied(instruction)
    return all(array.dtype.startswith(("f8", "s8")) for array in arrays)


def multiplied(instruction: Instruction) -> list[HloArray]:
    """Return what a product or an attention kernel multiplies; [] of all else.

    Not what a library's call adds or scales by, nor a kernel's masks and sizes.
    """
    arrays = [a for i in instruction.operands for a in i.arrays[:1]]
    own = instruction.opcode == "custom-call" and _CUBLAS not in instruction.attributes
    if own:
        arrays = [a for a in arrays if a.dtype.startswith(_FLOATS)]
    if product_flops(instruction):
        return arrays[:2]
    return arrays if own and attention_kernel_flops(instruction)[0] else []


def is_grouped(instruction: Instruction) -> bool:
    """Tell whether it is a kernel of model/experts/grouped.py, or in its place."""
    return instruction.opcode == "custom-call" and "(grouped_" in instruction.op_name


def _grouped_flops(instruction: Instruction) -> float:
    """Count what a kernel of model/experts/grouped.py multiplies of the rows in use."""
    if not is_kernel(instruction):
        return 0.0
    arrays = [a for i in instruction.operands for a in i.arrays[:1]]
    rows, *_ = [a for a in arrays if a.dtype.startswith(_FLOATS)]  # behind the sizes
    flops = 2.0 * math.prod(rows.dims) * instruction.arrays[0].dims[-1]
    return flops * expected_part(instruction.op_name)


def _convolution_flops(instruction: Instruction) -> float:
    """Count what meets the input, not the padding: TPU's batched products are padded.

    Source: HloCostAnalysis::HandleConvolution in openxla/xla.
    """
    left, right = (i.arrays[0].dims for i in instruction.operands[:2])
    labels = re.split("_|->", instruction.find(r" dim_labels=([\w>-]+)"))
    window = instruction.find(r" window=\{([^}]*)\}")
    fields = dict(item.split("=") for item in window.split())

    def of(key: str, rank: int, default: str) -> list[str]:
        return fields.get(key, "x".join([default] * rank)).split("x")

    rank = len(labels[0]) - 2
    pairs = 1
    for dim in range(rank):
        size, stride, left_dilate, right_dilate = (
            int(of(key, rank, "1")[dim])
            for key in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(of("pad", rank, "0_0")[dim].split("_")[0])
        outputs = instruction.arrays[0].dims[labels[2].index(str(dim))]
        at = np.arange(outputs)[:, None] * stride - low
        at = at + np.arange(size) * right_dilate
        end = (left[labels[0].index(str(dim))] - 1) * left_dilate + 1
        pairs *= int(np.sum((at >= 0) & (at < end) & (at % left_dilate == 0)))
    groups = int(instruction.find(r" batch_group_count=(\d+)") or 1)
    features = right[labels[1].index("i")] * right[labels[1].index("o")]
    return 2.0 * pairs * features * left[labels[0].index("b")] / groups


def attention_kernel_flops(instruction: Instruction) -> tuple[float, float]:
    """Count the FLOPs of an attention kernel, and the share of them that it computes.

    Splash skips whole blocks above the diagonal and behind a window; how many there are
    stands in the shape of its mask. For a causal cuDNN kernel the share is taken to be
    one half, with a window the part of all scores that is seen. Its operands have heads
    before positions or behind them: the shape of its scores tells which is which.
    """
    target = instruction.target
    arrays = [a for i in instruction.operands for a in i.arrays[:1]]
    if target.startswith("__cudnn$fmha"):
        scores = instruction.find(_SCORES)
        B, N, T, S = map(int, re.findall(r"\d+", scores))
        H = arrays[0].dims[-1]
        causal = instruction.find(r'"mask_type": ?"(?:PADDING_)?(CAUSAL)"')
        products = CUDNN_PRODUCTS["Backward" in target]
        window = int(instruction.find(r'"sliding_window_length": ?(\d+)') or 0)
        share = (T * window - window * (window - 1) / 2) / (T * S) if window else 0.5
        return 2.0 * products * B * N * T * S * H, share if causal else 1.0
    for name, products in SPLASH_PRODUCTS.items():
        if target == "tpu_custom_call" and name in instruction.op_name:
            q, k = [a for a in arrays if a.dtype.startswith(_FLOATS)][:2]
            rows = math.prod(q.dims[:-2])  # of the batch, by heads
            flops = 2.0 * products * rows * q.dims[-2] * k.dims[-2] * q.dims[-1]
            known = computed_blocks(instruction.op_name)
            masks = [a.dims for a in arrays if a.dtype == "s8" and len(a.dims) == 3]
            causal = causal_blocks(masks[0][-2:]) if masks else (1, 1)
            computed, blocks = known or causal
            return flops, computed / blocks
    return 0.0, 1.0


def is_kernel(instruction: Instruction) -> bool:
    """Tell whether a custom call may multiply matrices, not just move what it gets."""
    own = ("tpu_custom_call", "__gpu$xla.gpu.triton")
    return instruction.target.startswith((*own, "__cu", "__triton", "__onednn"))
