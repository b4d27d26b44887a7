"""What part of a vendor's figures programs get, from public measurements.

One factor for each resource of a platform, the mean of what is cited, the same for
every model and machine. They were settled before any prediction was compared with a
published run (benchmarks/published.py), and are not tuned to those.

Sources:
    products, TPU: AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks: v6e, 8192
        cubed, 827.5 of 918 TFLOP/s; tpu7x, 32768 cubed, 956.4 of 1153.5 a device.
    products, GPU: stas00/ml-engineering at 744d01e, compute/accelerator, the best of
        many shapes: A100 271.2 of 312, H100 794.5 of 989, B200 1745 of 2250.
    memory, TPU: tpu-recipes, copies: v6e 1359.6 of 1638 GB/s, tpu7x 6421 of 7380.
    memory, GPU: NVIDIA's own figure for the A100, 95 % of the bandwidth.
    links, TPU: tpu-recipes: all-gather on tpu7x, 2 x 2 chips, 178.8 of the 200 GB/s of
        two links; all-reduce on v6e, 16 x 16, 235.8 of the 400 GB/s of four.
    links, GPU: ml-engineering, network, 8 GPUs, 16 GiB: H200 all-gather 361.4, reduce-
        scatter 362.9, ring all-reduce 367.2 of 450 GB/s; A100 all-reduce 234.9 of 300.
    network, TPU: tpu-recipes, all-reduce between slices of v6e, 4.11 of 12.5 GB/s.
    network, GPU: as its links; ml-engineering gives the same 80 % for both.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Achievable:
    """Parts of the stated rates: matrix products, main memory, ICI or NVLink, DCN."""

    products: float
    memory: float
    links: float
    network: float


_TPU = Achievable(products=0.865, memory=0.85, links=0.74, network=0.33)
_GPU = Achievable(products=0.816, memory=0.95, links=0.80, network=0.80)


def achievable(platform: str) -> Achievable:
    """Give the factors of JAX's platform: `tpu`, or `gpu` or `cuda`."""
    return _TPU if platform == "tpu" else _GPU
