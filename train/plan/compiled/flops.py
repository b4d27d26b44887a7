"""Count the FLOPs of the matrix products in a compiled program.

Dots, convolutions and cuBLAS calls are counted. The text does not state the FLOPs of
kernels (attention, and products of rows grouped by expert): see `read_step`.
"""

import math
import re
from collections.abc import Iterable

import numpy as np

from train.plan.compiled.hlo import Executed, Instruction
from train.plan.cost import Flops

_CUBLAS = "__cublas$lt$matmul"
# Prefixes of the targets of custom calls that may multiply matrices.
_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "__cu", "__triton", "__onednn")


def count_flops(all_executed: Iterable[Executed]) -> Flops:
    """Return the FLOPs of products without kernels.

    `unknown` lists custom calls that may multiply, except kernels.
    """
    products = 0.0
    eight_bits = 0.0
    unknown = set[str]()
    for executed in all_executed:
        for inner in executed.instruction.with_nested:
            flops = executed.count * product_flops(inner)
            products += flops
            eight_bits += flops if has_eight_bits(inner) else 0.0
            may_multiply = inner.target.startswith(_TARGETS) and not _is_norm(inner)
            if may_multiply and not flops and not is_kernel(inner):
                unknown.add(inner.target)
    return Flops(products, unknown=tuple(sorted(unknown)), eight_bits=eight_bits)


def sum_flops(instructions: Iterable[Instruction]) -> float:
    """Count the FLOPs of products, including loops and called computations."""
    total = 0.0
    for instruction in instructions:
        trips = instruction.loop.trips if instruction.opcode == "while" else 1
        nested = sum(sum_flops(called.order) for called in instruction.called)
        total += product_flops(instruction) + trips * nested
    return total


def product_flops(instruction: Instruction) -> float:
    """Count the FLOPs of a dot, a convolution or a cuBLAS call; 0 for others."""
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction)
    if instruction.opcode == "dot":
        dims = instruction.find(r" lhs_contracting_dims=\{([\d,]*)\}")
    elif instruction.target.startswith(_CUBLAS):
        dims = instruction.find(r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    else:
        return 0.0
    lhs = instruction.operands[0].arrays[0]
    depth = math.prod(lhs.dims[int(dim)] for dim in re.findall(r"\d+", dims))
    return 2.0 * math.prod(instruction.arrays[0].dims) * depth


def _convolution_flops(instruction: Instruction) -> float:
    """Count the FLOPs of a product that XLA:TPU writes as a convolution.

    Products with the zeros of padding and dilation do not count.
    """
    values = (*instruction.operands[:2], instruction)
    lhs, rhs, output = (value.arrays[0].dims for value in values)
    labels = re.split("_|->", instruction.find(r" dim_labels=([\w>-]+)"))
    window = instruction.find(r" window=\{([^}]*)\}")
    fields = dict(item.split("=") for item in window.split())

    def field(key: str, dim: int, default: str = "1") -> int:
        value = fields[key].split("x")[dim] if key in fields else default
        return int(value.split("_")[0])

    pairs = 1  # The pairs are inputs and elements of the window that meet.
    for dim in range(len(labels[0]) - 2):
        starts = np.arange(output[labels[2].index(str(dim))]) * field("stride", dim)
        window_offsets = np.arange(field("size", dim)) - field("pad", dim, "0")
        positions = starts[:, None] + window_offsets
        dilation = field("lhs_dilate", dim)
        end = (lhs[labels[0].index(str(dim))] - 1) * dilation + 1
        is_input = (positions >= 0) & (positions < end) & (positions % dilation == 0)
        pairs *= int(np.sum(is_input))
    features = rhs[labels[1].index("i")] * rhs[labels[1].index("o")]
    return 2.0 * pairs * features * lhs[labels[0].index("b")]


def is_attention(instruction: Instruction) -> bool:
    """Return whether an instruction is an attention kernel of Splash or cuDNN."""
    if instruction.target == "tpu_custom_call":
        return "splash_mha" in instruction.op_name
    return instruction.target.startswith("__cudnn$fmha")


def is_grouped(instruction: Instruction) -> bool:
    """Return whether an instruction is a kernel of a grouped product."""
    is_call = instruction.target.startswith(_TARGETS)
    return is_call and "(grouped_" in instruction.op_name


def _is_norm(instruction: Instruction) -> bool:
    """Return whether an instruction is a kernel of a norm (model/parts/kernels/)."""
    return instruction.op_name.endswith("_norm/pallas_call")


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction is an attention or a grouped kernel."""
    return is_attention(instruction) or is_grouped(instruction)


def multiplies(instruction: Instruction) -> bool:
    """Return whether an instruction, or one inside it, multiplies matrices."""
    inside = (instruction, *instruction.nested)
    return any(product_flops(inner) or is_kernel(inner) for inner in inside)


def has_eight_bits(instruction: Instruction) -> bool:
    """Return whether both operands of a product or a grouped kernel have eight bits.

    A kernel's integer operands, such as the number of rows of each expert, come first.
    """
    dtypes = [operand.arrays[0].dtype for operand in instruction.operands]
    if is_grouped(instruction):
        dtypes = [dtype for dtype in dtypes if dtype.startswith(("f", "bf"))]
    return all(dtype.startswith(("f8", "s8")) for dtype in dtypes[:2])
