"""The fractions of vendors' rates that programs achieve, as constants with sources.

This project measured none of these constants itself. Most are published measurements
of single kernels, copies and collectives. These are fitted to published runs, and
other runs judge them (`python -m benchmarks.published`):

constant                     fitted to                          judged by
products (v6e)               Llama 3.1 8B on v6e-8              8B and 70B on 16 to 256
grouped.rate                 Mixtral 8x7B on v5p-128            the same on v5p-512
eight_bits (TPUs)            Llama 3.1 405B on tpu7x-512        no run
hop_s, unhidden, spread      2, 8 and 32 slices of v5e-256      4 and 16 slices
products (A100, H100),       24 runs on A100 and H100           43 other runs
  memory (GPUs)

Products and memory are slower in a training step than in a single kernel, so their
fractions on GPUs and on v6e are fitted to whole steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionRates:
    """Rates of a causal attention kernel, forward and backward together.

    fractions: the least head dim -> the fraction of the bfloat16 peak in long rows.
    half_length: the row length at which the kernel reaches half of that fraction.
    """

    fractions: Mapping[int, float]
    half_length: float

    def fraction(self, head_dim: int, length: float) -> float:
        """Return the fraction of the peak for a head dim and a row length."""
        dims = [dim for dim in self.fractions if dim <= head_dim]
        nearest_dim = max(dims, default=min(self.fractions))
        return self.fractions[nearest_dim] * length / (length + self.half_length)


@dataclass(frozen=True)
class GroupedRates:
    """Rates of products whose rows are grouped by expert.

    rate: the rate relative to that of one ungrouped product with the same rows.
    intensity: the FLOPs per byte that the kernel's tiles load from memory.
    """

    rate: float = 1.0
    intensity: float = math.inf


@dataclass(frozen=True)
class Achievable:
    """The achieved fractions of stated rates, and costs that no vendor states.

    products: the fraction of the matrix units' rate. GPUs: the fraction in a training
        step, for long contractions.
    eight_bits: the same for products in eight bits; 0 if it is that of others.
    memory: the fraction of the main-memory bandwidth.
    links: the fraction of the bandwidth of ICI or NVLink.
    network: the fraction of the bandwidth of DCN or of network cards.
    half_depth: the contracted dim at which a GPU's product reaches half of its rate.
    grouped: the rates of products whose rows are grouped by expert.
    attention: the rates of attention on a GPU; None if they are those of products.
    start_s: the seconds to start a collective; an all-reduce takes twice as long.
    hop_s: the additional seconds for each further slice or node.
    unhidden: the fraction of the time of an overlapped collective between TPU slices
        that still delays products.
    spread: the standard deviation of step times over slices or nodes, relative to
        their mean (`slowest_ratio`).
    """

    products: float
    memory: float
    links: float
    network: float
    eight_bits: float = 0.0
    half_depth: float = 0.0
    grouped: GroupedRates = GroupedRates()
    attention: AttentionRates | None = None
    start_s: float = 0.0
    hop_s: float = 0.0
    unhidden: float = 0.0
    spread: float = 0.0


# Sources of TPU. A constant with two measurements is the mean of their ratios.
# products: AI-Hypercomputer/tpu-recipes at c8cfe2f, microbenchmarks: v6e, 8192 cubed,
#     827.5 of 918 TFLOP/s; tpu7x, 32768 cubed, 956.4 of 1153.5 a device.
# memory: the same source, copies: v6e 1359.6 of 1638 GB/s, tpu7x 6421 of 7380.
# links: the same source: all-gather on tpu7x, 2 x 2 chips, 178.8 of the 200 GB/s of two
#     links; all-reduce on v6e, 16 x 16, 235.8 of the 400 GB/s of four.
# network: the same source, all-reduce between v6e slices, 4.11 of 12.5 GB/s.
# hop_s, unhidden, spread: fitted to AI-Hypercomputer/maxtext at e591f30, src/maxtext/
#     configs/tpu/v5e/README.md, four models on 2, 8 and 32 slices; the rows on 4 and 16
#     slices validate them (docs/log).
# eight_bits: fitted to a run in float8 (benchmarks/published_experts.json).
# grouped: rate fitted to MaxText's Mixtral 8x7B on v5p-128; the row on v5p-512
#     validates it. intensity: tiles of 512 cubed (model/parts/experts/grouped.py),
#     2 x 512^3 FLOPs for 2 x 512^2 values of 2 bytes.
TPU = Achievable(
    products=0.865,
    eight_bits=0.6,
    grouped=GroupedRates(rate=0.77, intensity=256),
    memory=0.85,
    links=0.74,
    network=0.33,
    hop_s=65e-6,
    unhidden=0.14,
    spread=0.014,
)

# The products of v6e: fitted to Llama 3.1 8B on v6e-8 (AI-Hypercomputer/tpu-recipes at
# c8cfe2f, training/trillium), because whole steps are slower there than single
# products; Mixtral 8x7B on v6e-256 validates the fit.
TPU_V6E = replace(TPU, products=0.65)

# Sources of HOPPER and AMPERE:
# half_depth: tile-ai/tilelang, benchmark/matmul/README.md (H800), M = N = 8192: 386,
#     520, 628, 705, 736, 758 and 766 TFLOP/s for K of 256, 512, ..., 16384.
# attention: arXiv:2407.08608v2, figures of H100: cuDNN forward, causal, 512 to 16384
#     tokens, for head dims 128 and 64: 315 to 539 and 225 to 388 TFLOP/s; backward 305
#     to 516 and 266 to 433. FlashAttention-2: 191 to 335 and 180 to 299; backward 214
#     to 322 and 198 to 291. Weighted as 2 products forward and 5 backward. A100:
#     arXiv:2307.08691: up to 73 % of the peak forward, 63 % backward; Triton's older
#     kernel 1.3 to 2.5 x slower.
# links, network: stas00/ml-engineering at 744d01e, network, 8 GPUs, 16 GiB: H200
#     all-gather 361.4, reduce-scatter 362.9, ring all-reduce 367.2 of 450 GB/s; A100
#     all-reduce 234.9 of 300. Network cards are assumed to reach the same fraction.
# start_s, hop_s: the same source, network/benchmarks: on 8 x H200, an all-reduce of 1
#     to 128 MiB takes 20 to 80 us longer than the transfer of its bytes. On 4 nodes of
#     B200, an all-reduce of 1 MiB takes 160 us.
# grouped: assumed equal to the rate of other products; no public run validates it.
# products: fitted to public runs. The best of many shapes in a short test is 0.87 on
#     A100, 0.80 on H100, 0.78 on B200 (ml-engineering, compute/accelerator), and 0.74
#     on H100 over minutes (huggingface/gpu-fryer, README.md). Blackwell has no public
#     run, so its fractions are Hopper's.
# memory: fitted to public runs, with one value for all chips. NVIDIA states 95 % of the
#     bandwidth for the A100.
# spread: assumed equal to the value for slices of TPUs.
HOPPER = Achievable(
    products=0.63,
    memory=0.85,
    links=0.80,
    network=0.80,
    half_depth=240,
    attention=AttentionRates({64: 0.43, 128: 0.54}, half_length=320),
    start_s=25e-6,
    hop_s=20e-6,
    spread=0.014,
)
AMPERE = replace(
    HOPPER,
    products=0.79,
    attention=AttentionRates({64: 0.55, 128: 0.65}, half_length=300),
)
BLACKWELL = HOPPER


def slowest_ratio(count: int, spread: float) -> float:
    """Return the expected ratio of the slowest of several step times to their mean.

    `count` is the number of step times; `spread` is their relative standard deviation.
    Source: the expected maximum of n normal variables is close to sqrt(2 ln n) standard
    deviations.
    """
    return 1 + spread * math.sqrt(2 * math.log(max(1, count)))
