"""Published runs on GPUs, and the closest keys of `python -m train.plan`.

Other trainers differ from this one. Keys and published rates describe their attention
kernels, memory, networks and unrolled layers; `differs` names the other differences.
Constants of train/hardware/achievable.py are fitted to the rows with the use "settled
on", about every second one of the rows that were examined first. All other rows
validate the constants, with the use "judged by". Some of these rows were not examined
before the fit. Runs with rows of more than 8,192 tokens are left out.
"""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.published_rows import LLAMA3_8B, MAXTEXT_AT, OWN_FLAGS, Row
from train.hardware.achievable import AttentionRates

_SETTLED = "settled on"
_MPT_AT = "mosaicml/llm-foundry at 8c8dd48, scripts/train/benchmarking/README.md"
_TITAN_AT = "pytorch/torchtitan at 31a17bf, benchmarks/llama3_h100_202412_torchtitan.md"
_ASYNC_AT = "pytorch/torchtitan at 2887250, benchmarks/, vanilla tensor parallelism"
_FMS_AT = "foundation-model-stack/fms-fsdp at 5a296af, README.md"
_PAX_AT = "NVIDIA/JAX-Toolbox at 08b08d1, rosetta/rosetta/projects/pax/README.md"
_NO_LOOP = "model.layer_unroll=-1"
_LLAMA2_7B = (
    *("model=llama3_8b", "model.num_kv_heads=32", "model.mlp_dim=11008"),
    *("model.vocab_size=32000", "data.sequence_length=4096", _NO_LOOP),
)
_LLAMA3_70B = (
    *(*LLAMA3_8B, "model.num_layers=80", "model.embed_dim=8192"),
    *("model.num_heads=64", "model.mlp_dim=28672", _NO_LOOP),
)
_PAX = (
    *("model=gpt2_124m", "model.vocab_size=50304", "model.max_sequence_length=2048"),
    "data.sequence_length=2048",
)
# Attention kernels of other trainers, as fractions of the peak for head dims 64 and 128
# (sources: train/hardware/achievable.py). The half_length is about that of cuDNN.
# Triton's older kernel is 1.3 to 2.5 times slower than FlashAttention-2
# (arXiv:2307.08691); these rates assume 1.8 times.
_FLASH_2 = {
    "h100": AttentionRates({64: 0.295, 128: 0.33}, 300),
    "a100": AttentionRates({64: 0.55, 128: 0.65}, 300),
}
_TRITON = {
    "h100": AttentionRates({64: 0.16, 128: 0.18}, 300),
    "a100": AttentionRates({64: 0.31, 128: 0.36}, 300),
}
# The H100s of torchtitan's runs have slower memory and a power limit of 500 W.
_TITAN = {"hbm_bandwidth": 2400e9, "attention": _FLASH_2["h100"]}
_TITAN_DIFFERS = "PyTorch; 500 W; it recomputes half of the products"
_PYTORCH = "PyTorch"
_SIZES = {  # embed_dim, num_heads, num_layers
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}


class _Mpt(NamedTuple):
    """A row of the source's tables: bfloat16, parameters sharded over all GPUs.

    rows: the rows of one microbatch on one GPU.
    full: whether whole layers are rematerialised; otherwise nothing is.
    tokens: tokens per second on one GPU.
    """

    size: str
    length: int
    gpus: int
    rows: int
    microbatches: int
    full: bool
    tokens: int
    chip: str
    use: str = "judged by"

    def as_row(self) -> Row:
        """Return the run as a `Row` with keys of `python -m train.plan`."""
        width, heads, layers = _SIZES[self.size]
        nodes = self.gpus // 8
        target = f"{self.chip}-8" + (f"x{nodes}" if nodes > 1 else "")
        keys = {
            "model": "gpt2_124m",
            "model.embed_dim": width,
            "model.num_heads": heads,
            "model.num_layers": layers,
            "model.vocab_size": 50368,
            "model.max_sequence_length": self.length,
            "data.sequence_length": self.length,
            "model.bias": "false",
            "model.layer_unroll": -1,
            "mesh": "fsdp",
            "train.remat": "full" if self.full else "none",
            "train.accumulation_steps": self.microbatches,
            "data.batch_size": self.rows * self.microbatches * self.gpus,
            "target": target,
        }
        return Row(
            f"MPT {self.size}, {self.length:,} tokens, {target}",
            _MPT_AT,
            tuple(f"{key}={value}" for key, value in keys.items()),
            tokens=self.tokens,
            date="2024-01",
            differs=_PYTORCH,
            chip={"attention": _TRITON[self.chip]},
            use=self.use,
        )


_MPTS = (
    _Mpt("70b", 2048, 64, 8, 4, True, 1039, "h100", _SETTLED),
    _Mpt("30b", 8192, 8, 1, 21, True, 1384, "h100"),
    _Mpt("30b", 2048, 32, 14, 3, True, 2308, "h100", _SETTLED),
    _Mpt("30b", 2048, 8, 3, 21, True, 2002, "h100"),
    _Mpt("13b", 4096, 8, 10, 3, True, 4717, "h100", _SETTLED),
    _Mpt("13b", 2048, 64, 2, 1, False, 4800, "h100"),
    _Mpt("13b", 2048, 8, 2, 1, False, 4792, "h100", _SETTLED),
    _Mpt("7b", 8192, 8, 8, 2, True, 6935, "h100", _SETTLED),
    _Mpt("7b", 2048, 8, 6, 1, False, 10643, "h100"),
    _Mpt("3b", 8192, 8, 3, 6, False, 16578, "h100", _SETTLED),
    _Mpt("3b", 2048, 64, 6, 3, False, 22525, "h100"),
    _Mpt("3b", 2048, 16, 10, 3, False, 24142, "h100", _SETTLED),
    _Mpt("3b", 512, 8, 40, 6, False, 27965, "h100"),
    _Mpt("1b", 2048, 64, 20, 1, False, 44402, "h100"),
    _Mpt("1b", 2048, 8, 14, 1, False, 45455, "h100", _SETTLED),
    _Mpt("1b", 512, 8, 56, 4, False, 52275, "h100"),
    _Mpt("760m", 4096, 8, 12, 2, False, 55459, "h100", _SETTLED),
    _Mpt("760m", 2048, 32, 24, 1, False, 67971, "h100"),
    _Mpt("760m", 512, 8, 96, 2, False, 83749, "h100", _SETTLED),
    _Mpt("70b", 2048, 64, 8, 4, True, 410, "a100"),
    _Mpt("30b", 2048, 8, 3, 21, True, 916, "a100", _SETTLED),
    _Mpt("13b", 8192, 8, 5, 3, True, 1795, "a100"),
    _Mpt("13b", 2048, 8, 2, 3, False, 2262, "a100", _SETTLED),
    _Mpt("7b", 2048, 8, 6, 2, False, 4641, "a100", _SETTLED),
    _Mpt("3b", 8192, 8, 3, 6, False, 7695, "a100"),
    _Mpt("3b", 2048, 8, 10, 2, False, 10811, "a100", _SETTLED),
    _Mpt("3b", 512, 8, 40, 6, False, 12127, "a100"),
    _Mpt("1b", 8192, 8, 3, 4, False, 13814, "a100", _SETTLED),
    _Mpt("1b", 2048, 8, 14, 4, False, 20513, "a100"),
    _Mpt("760m", 2048, 8, 24, 2, False, 32434, "a100", _SETTLED),
    _Mpt("350m", 2048, 8, 32, 2, False, 58782, "a100"),
    _Mpt("350m", 512, 8, 128, 2, False, 69330, "a100", _SETTLED),
    _Mpt("125m", 8192, 8, 8, 2, False, 90392, "a100"),
    _Mpt("125m", 2048, 8, 32, 2, False, 141737, "a100", _SETTLED),
    # These rows were not examined before the constants were fitted.
    _Mpt("70b", 2048, 128, 8, 1, True, 1058, "h100"),
    _Mpt("70b", 2048, 512, 8, 1, True, 1007, "h100"),
    _Mpt("30b", 4096, 8, 1, 21, True, 1802, "h100"),
    _Mpt("30b", 2048, 16, 10, 3, True, 2263, "h100"),
    _Mpt("13b", 1024, 8, 40, 3, True, 5502, "h100"),
    _Mpt("7b", 4096, 8, 16, 2, True, 8611, "h100"),
    _Mpt("7b", 2048, 256, 6, 1, False, 10119, "h100"),
    _Mpt("3b", 4096, 8, 5, 6, False, 20964, "h100"),
    _Mpt("1b", 4096, 8, 7, 4, False, 38535, "h100"),
    _Mpt("760m", 8192, 8, 6, 2, False, 41825, "h100"),
    _Mpt("760m", 1024, 8, 48, 2, False, 78581, "h100"),
    _Mpt("30b", 4096, 8, 1, 21, True, 814, "a100"),
    _Mpt("13b", 4096, 8, 10, 3, True, 2060, "a100"),
    _Mpt("7b", 8192, 8, 8, 2, True, 3206, "a100"),
    _Mpt("7b", 1024, 8, 64, 2, True, 4357, "a100"),
    _Mpt("3b", 4096, 8, 5, 6, False, 9457, "a100"),
    _Mpt("1b", 4096, 8, 7, 4, False, 17807, "a100"),
    _Mpt("1b", 512, 8, 56, 4, False, 23148, "a100"),
    _Mpt("350m", 4096, 8, 16, 2, False, 49555, "a100"),
    _Mpt("125m", 1024, 8, 64, 2, False, 156468, "a100"),
)


def _maxtext() -> Iterator[Row]:
    """Yield runs of Llama 2 7B on 1 to 16 nodes; a node's GPUs shard the parameters."""
    for nodes, teraflops, use in (
        *((1, 492, ""), (2, 422, _SETTLED), (4, 407, "")),
        *((8, 409, _SETTLED), (16, 375, "")),
    ):
        across = (f"mesh.data={nodes}", f"mesh.dcn.data={nodes}")
        target = "h100-8" if nodes == 1 else f"h100-8x{nodes}"
        yield Row(
            f"MaxText Llama 2 7B, {target}",
            MAXTEXT_AT + "gpu/a3/llama_2_7b, gpu/models/llama2_7b.yml",
            (
                *(*_LLAMA2_7B, "mesh=fsdp", *(across if nodes > 1 else ())),
                *("train.remat=dots", f"data.batch_size={32 * nodes}"),
                f"target={target}",
            ),
            flops=teraflops * 1e12,
            differs=f"it also keeps what attention makes; {OWN_FLAGS}",
            chip={"dcn_bandwidth": 1000e9 / 8 / 8},  # A3 High: 1,000 Gbit/s a node
            use=use or "judged by",
        )


_OTHERS = (
    Row(
        "torchtitan Llama 3.1 8B, h100-8",
        _TITAN_AT + ", table 1, compiled",
        (
            *(*LLAMA3_8B, "mesh=fsdp", "train.remat=dots", _NO_LOOP),
            *("data.batch_size=16", "target=h100-8"),
        ),
        tokens=6667,
        date="2024-12",
        differs=_TITAN_DIFFERS,
        chip=_TITAN,
        use=_SETTLED,
    ),
    Row(
        "torchtitan Llama 3.1 8B, h100-8x16",
        _TITAN_AT + ", table 3, compiled",
        (
            *(*LLAMA3_8B, "mesh=fsdp", "train.remat=dots", _NO_LOOP),
            *("data.batch_size=256", "target=h100-8x16"),
        ),
        tokens=6514,
        date="2024-12",
        differs=_TITAN_DIFFERS,
        chip=_TITAN,
    ),
    Row(
        "torchtitan Llama 3.1 8B, tensor 8, h100-8x8",
        _ASYNC_AT,
        (
            *(*LLAMA3_8B, "mesh=fsdp_tensor", "mesh.tensor=8", "train.remat=dots"),
            *(_NO_LOOP, "data.batch_size=96", "target=h100-8x8"),
        ),
        tokens=4378,
        date="2025-06",
        differs=_TITAN_DIFFERS,
        chip=_TITAN,
        use=_SETTLED,
    ),
    Row(
        "torchtitan Llama 3.1 70B, tensor 8, h100-8x32",
        _ASYNC_AT,
        (
            *(*_LLAMA3_70B, "mesh=fsdp_tensor", "mesh.tensor=8", "train.remat=full"),
            *("data.batch_size=512", "target=h100-8x32"),
        ),
        tokens=597.3,
        date="2025-06",
        differs="PyTorch; 500 W",
        chip=_TITAN,
    ),
    Row(
        "fms-fsdp Llama 2 7B, a100-8x16",
        _FMS_AT,
        (
            *(*_LLAMA2_7B, "mesh=fsdp", "mesh.data=16", "mesh.dcn.data=16"),
            *("train.remat=none", "data.batch_size=256", "target=a100-8x16"),
        ),
        tokens=4550,
        date="2024-05",
        differs=_PYTORCH,
        chip={"attention": _FLASH_2["a100"], "dcn_bandwidth": 400e9 / 8 / 8},
        use=_SETTLED,
    ),
    Row(
        "fms-fsdp Llama 2 7B, h100-8x12",
        _FMS_AT,
        (
            *(*_LLAMA2_7B, "mesh=fsdp", "mesh.data=12", "mesh.dcn.data=12"),
            *("train.remat=none", "data.batch_size=192", "target=h100-8x12"),
        ),
        tokens=9600,
        date="2024-05",
        differs=_PYTORCH,
        chip={"attention": _FLASH_2["h100"], "dcn_bandwidth": 800e9 / 8 / 8},
    ),
    Row(
        "Pax GPT 5B, a100-8x32",
        _PAX_AT + "; google/paxml, paxml/contrib/gpu/scripts_gpu/configs.py",
        (
            *(*_PAX, "model.num_layers=24", "model.num_heads=32", "mesh=fsdp"),
            *("model.embed_dim=4096", "model.mlp_dim=16384", "train.remat=dots"),
            *("data.batch_size=2048", "target=a100-8x32"),
        ),
        tokens=598.83 * 2048 / 256,
        differs="Transformer Engine in bfloat16; dropout",
        use=_SETTLED,
    ),
    Row(
        "Pax GPT 126M, a100-8x8",
        _PAX_AT + "; google/paxml, paxml/contrib/gpu/scripts_gpu/configs.py",
        (
            *(*_PAX, "mesh=ddp", "train.remat=none"),
            *("data.batch_size=256", "target=a100-8x8"),
        ),
        tokens=2339.8 * 2048 / 64,
        differs="Transformer Engine in bfloat16",
    ),
)
GPU_ROWS = (*(mpt.as_row() for mpt in _MPTS), *_maxtext(), *_OTHERS)
# B200 has the constants of H100, so this row judges them on another chip.
B200_ROWS = (
    Row(
        "torchtitan Llama 3 8B, b200-8",
        "pytorch/torchtitan at b5bcd76, torchtitan/components/quantization/mxfp8.md, "
        "dense models, bfloat16",
        (
            *(*LLAMA3_8B, "mesh=fsdp", "train.remat=dots", _NO_LOOP),
            *("data.batch_size=8", "target=b200-8"),
        ),
        tokens=8307.5,
        date="2025-08",
        differs="PyTorch; power-limited; it recomputes half of the products",
    ),
)
