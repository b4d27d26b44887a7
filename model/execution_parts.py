"""The kernels and methods that an execution is chosen from."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from data.errors import Mistake
from model.attention.method import AttentionMethod
from model.choices import Attention, ComputeDtype, ContextAttention, Grouped
from model.execution import NormKernel, Pipeline
from model.products import Quantization


class ExecutionParts(NamedTuple):
    """Functions that choose or make the parts of an `Execution`.

    choose_kernel: returns the kernel of a setting on a platform, or a mistake.
    choose_context_attention: returns how devices that share rows attend, or a mistake.
    make_attention: returns the method of a kernel and of a way to share rows.
    choose_grouped: returns the kernel of grouped products on a platform.
    choose_norm: returns the kernel of norms over a number of dims on a platform, or
        None.
    quantizations: functions from whether products are emulated to products in eight
        bits, by dtype.
    make_pipeline: returns the pipeline with these numbers of microbatches and repeats.
    """

    choose_kernel: Callable[..., Attention | Mistake]
    choose_context_attention: Callable[..., ContextAttention | Mistake]
    make_attention: Callable[[Attention, ContextAttention | None], AttentionMethod]
    choose_grouped: Callable[[str], Grouped]
    choose_norm: Callable[[str, int], NormKernel | None]
    quantizations: Mapping[ComputeDtype, Callable[[bool], Quantization]]
    make_pipeline: Callable[[int, int], Pipeline]
