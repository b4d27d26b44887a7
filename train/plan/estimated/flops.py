"""FLOPs of one device in a step: its matrix products, and its attention kernels."""

from model.config import Attention
from train.plan.cost import CUDNN_PRODUCTS, SPLASH_PRODUCTS, Flops
from train.plan.estimated.local_step import LocalStep

_FORWARD = "splash_mha_fwd"


def count_flops(step: LocalStep) -> Flops:
    """Count what a device multiplies."""
    kernels = [op for op in step.gradients.each() if op.is_kernel]
    products = step.microbatches * sum(
        op.place.times * op.flops for op in step.gradients.each() if not op.is_kernel
    )
    products += sum(op.place.times * op.flops for op in step.update.each())
    whole = attention = 0.0
    backward = sum(n for name, n in SPLASH_PRODUCTS.items() if name != _FORWARD)
    for op in kernels:
        factor, part = 1.0, op.part
        if step.attention is Attention.cudnn:  # Splash was traced instead of it
            part = 0.5
            if op.place.is_backward:
                factor = CUDNN_PRODUCTS[True] / backward
        flops = step.microbatches * op.place.times * op.flops * factor
        whole += flops
        attention += flops * part
    return Flops(products, attention, whole)
