"""Published runs, and the keys of `python -m train.plan` that come nearest to them."""

from dataclasses import dataclass

_MAXTEXT = (
    *("model=llama3_8b", "model.vocab_size=32000", "model.head_dim=128"),
    *("data.sequence_length=2048",),
)
_64_HEADS = ("model.num_heads=64", "model.num_kv_heads=64", "model.mlp_dim=28672")
_16B = (*_MAXTEXT, *_64_HEADS, "model.embed_dim=4096")
_32B = (*_MAXTEXT, *_64_HEADS, "model.embed_dim=8192")
_22B = (
    *_MAXTEXT,
    *("model.num_heads=24", "model.num_kv_heads=24", "model.mlp_dim=24576"),
    *("model.embed_dim=6144", "model.num_layers=48"),
)
_LLAMA2_7B = (
    *("model=llama3_8b", "model.num_kv_heads=32", "model.mlp_dim=11008"),
    *("model.vocab_size=32000", "data.sequence_length=4096"),
)
_LLAMA3_8B = ("model=llama3_8b", "data.sequence_length=8192")
_PAX = (
    *("model=gpt2_124m", "model.vocab_size=50304", "model.max_sequence_length=2048"),
    *("data.sequence_length=2048",),
)
_MAXTEXT_AT = "AI-Hypercomputer/maxtext at e591f30, src/maxtext/configs/"
_TITAN_AT = "pytorch/torchtitan at b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md"
_PAX_AT = "NVIDIA/JAX-Toolbox at 08b08d1, rosetta/rosetta/projects/pax/README.md"
_OWN_FLAGS = "its own XLA flags"
_TITAN_DIFFERS = (
    "PyTorch; its H100s have 2.4 TB/s and 500 W; it recomputes half of the products"
)


@dataclass(frozen=True)
class Row:
    """A published run.

    flops: model FLOPs a second and chip, or tokens: tokens a second and chip.
    differs: what the keys cannot say.
    kept: numbers of slices, and the speed a chip kept of that in a single slice.
    """

    name: str
    source: str
    overrides: tuple[str, ...]
    flops: float | None = None
    tokens: float | None = None
    differs: str = _OWN_FLAGS
    kept: tuple[tuple[int, float], ...] = ()


ROWS = (
    Row(
        "MaxText 16B, v5e-256",
        _MAXTEXT_AT + "tpu/v5e/16b.sh, README.md",
        (
            *_16B,
            "mesh=fsdp",
            "train.remat=full",
            "data.batch_size=1536",
            "target=v5e-256",
        ),
        flops=120e12,
    ),
    Row(
        "MaxText 16B, 2 x v5e-256",
        _MAXTEXT_AT + "tpu/v5e/16b.sh, README.md",
        (
            *(*_16B, "mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2"),
            *("train.remat=full", "data.batch_size=3072", "target=v5e-256x2"),
        ),
        flops=117e12,
        kept=tuple(
            (n, mfu / 61.10)
            for n, mfu in ((2, 59.37), (4, 59.14), (8, 58.27), (16, 56.56), (32, 54.65))
        ),
    ),
    Row(
        "MaxText 32B, v5e-256",
        _MAXTEXT_AT + "tpu/v5e/32b.sh, README.md",
        (
            *_32B,
            "mesh=fsdp",
            "train.remat=full",
            "data.batch_size=1024",
            "target=v5e-256",
        ),
        flops=132e12,
    ),
    Row(
        "MaxText 22B, v4-128",
        _MAXTEXT_AT + "tpu/v4/22b.sh, README.md",
        (
            *_22B,
            "mesh=fsdp",
            "train.remat=full",
            "data.batch_size=832",
            "target=v4-128",
        ),
        flops=156e12,
    ),
    Row(
        "MaxText 32B, v5p-128",
        _MAXTEXT_AT + "tpu/v5p/32b.sh, README.md",
        (
            *(*_32B, "mesh=fsdp_tensor", "mesh.tensor=4", "train.remat=dots"),
            *("mesh.activations.embed=tensor", "data.batch_size=384", "target=v5p-128"),
        ),
        flops=328e12,
    ),
    Row(
        "MaxText Llama 3.1 8B, v6e-8",
        "AI-Hypercomputer/tpu-recipes at c8cfe2f, training/trillium/"
        "Llama3.1-8B-MaxText/v6e-8/README.md",
        (
            *_LLAMA3_8B,
            "mesh=fsdp",
            "train.remat=full",
            "data.batch_size=24",
            "target=v6e-8",
        ),
        tokens=7138.89,
        differs="it moves what attention's projections make to the host instead of "
        f"recomputing it; larger attention blocks; {_OWN_FLAGS}",
    ),
    Row(
        "MaxText Llama 2 7B, 8 x H100",
        _MAXTEXT_AT + "gpu/a3/llama_2_7b, gpu/models/llama2_7b.yml",
        (
            *_LLAMA2_7B,
            "mesh=fsdp",
            "train.remat=dots",
            "data.batch_size=32",
            "target=h100-8",
        ),
        flops=492e12,
        differs=f"it also keeps what attention makes, and unrolls; {_OWN_FLAGS}",
    ),
    Row(
        "MaxText Llama 2 7B, 16 x 8 H100",
        _MAXTEXT_AT + "gpu/a3/llama_2_7b, gpu/models/llama2_7b.yml",
        (
            *(*_LLAMA2_7B, "mesh=fsdp", "mesh.data=16", "mesh.dcn.data=16"),
            *("train.remat=dots", "data.batch_size=512", "target=h100-8x16"),
        ),
        flops=375e12,
        differs="its nodes are Google's A3, their networks not a DGX's; it also "
        f"keeps what attention makes, and unrolls; {_OWN_FLAGS}",
    ),
    Row(
        "torchtitan Llama 3.1 8B, 8 x H100",
        _TITAN_AT + ", table 1, compiled",
        (
            *_LLAMA3_8B,
            "mesh=fsdp",
            "train.remat=dots",
            "data.batch_size=16",
            "target=h100-8",
        ),
        tokens=6667,
        differs=_TITAN_DIFFERS,
    ),
    Row(
        "torchtitan Llama 3.1 8B, 16 x 8 H100",
        _TITAN_AT + ", table 3, compiled",
        (
            *_LLAMA3_8B,
            "mesh=fsdp",
            "train.remat=dots",
            "data.batch_size=256",
            "target=h100-8x16",
        ),
        tokens=6514,
        differs=_TITAN_DIFFERS,
    ),
    Row(
        "Pax GPT 5B, 32 x 8 A100",
        _PAX_AT + "; google/paxml, paxml/contrib/gpu/scripts_gpu/configs.py",
        (
            *(*_PAX, "model.num_layers=24", "model.num_heads=32", "mesh=fsdp"),
            *("model.embed_dim=4096", "model.mlp_dim=16384", "train.remat=dots"),
            "data.batch_size=2048",
            "target=a100-8x32",
        ),
        tokens=598.83 * 2048 / 256,
        differs="Transformer Engine in bfloat16; dropout",
    ),
    Row(
        "Pax GPT 126M, 8 x 8 A100",
        _PAX_AT + "; google/paxml, paxml/contrib/gpu/scripts_gpu/configs.py",
        (
            *_PAX,
            "mesh=ddp",
            "train.remat=none",
            "data.batch_size=256",
            "target=a100-8x8",
        ),
        tokens=2339.8 * 2048 / 64,
        differs="Transformer Engine in bfloat16",
    ),
)
