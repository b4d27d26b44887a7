"""Published runs of Llama 3.1 on TPUs, and the closest keys of `python -m train.plan`.

All runs are of MaxText. Its remat policies also save or offload the results of the
MLP's last projection, which the backward pass does not need. So `differs` omits them.
"""

from collections.abc import Iterator

from benchmarks.published_rows import LLAMA3_8B, OFFLOADED, OWN_FLAGS, RECIPES_AT, Row

_SOURCE = f"{RECIPES_AT}c8cfe2f, training/"
_LLAMA3_70B = ("model=llama3_70b", "data.sequence_length=8192", "mesh=fsdp")
_LLAMA3_405B = ("model=llama3_405b", "data.sequence_length=8192", "mesh=fsdp")
_QKV = "query,key,value"
_QKV_OFFLOADED = f"train.remat=[{_QKV}]", f"train.offload=[residual,{_QKV}]"
_BLOCKS = f"larger attention blocks; {OWN_FLAGS}"

_8B_ON_V6E = {  # chips: rows per chip, tokens per second and chip
    8: (3, 7138.890),
    16: (3, 7243.378),
    32: (3, 7031.689),
    64: (5, 7247.111),
    128: (4, 7119.648),
    256: (4, 7207.336),
}
_70B_ON_V6E = {
    32: (2, 920.965),
    64: (2, 876.736),
    128: (4, 941.976),
    256: (5, 960.248),
}


def _v6e() -> Iterator[Row]:
    """Yield runs on v6e. The rate of v6e's products is fitted to 8B on 8 chips."""
    for chips, (rows, tokens) in _8B_ON_V6E.items():
        yield Row(
            f"MaxText Llama 3.1 8B, v6e-{chips}",
            f"{_SOURCE}trillium/Llama3.1-8B-MaxText/v6e-{chips}/README.md",
            (
                *(*LLAMA3_8B, "mesh=fsdp", *OFFLOADED),
                *(f"data.batch_size={rows * chips}", f"target=v6e-{chips}"),
            ),
            tokens=tokens,
            differs=_BLOCKS,
            use="settled on" if chips == 8 else "judged by",
        )
    for chips, (rows, tokens) in _70B_ON_V6E.items():
        dtypes = ("model.param_dtype=bfloat16", "optimizer.moment_dtype=bfloat16")
        yield Row(
            f"MaxText Llama 3.1 70B, v6e-{chips}",
            f"{_SOURCE}trillium/Llama3.1-70B-MaxText/v6e-{chips}/README.md",
            (
                *(*_LLAMA3_70B, *_QKV_OFFLOADED, *(dtypes if chips == 32 else ())),
                *(f"data.batch_size={rows * chips}", f"target=v6e-{chips}"),
            ),
            tokens=tokens,
            differs=_BLOCKS,
        )


_SMALL_MOMENTS = "optimizer.moment_dtype=bfloat16"
_SECOND_MOMENTS = "second moments of float32"
# No source states the bandwidth of TPU7x to host memory. This is the one of v4.
_HOST = {"host_bandwidth": 16e9}


def _tpu7x() -> Iterator[Row]:
    """Yield runs on TPU7x. A target's name counts cores, of which a chip has two."""
    for chips, rows, seconds in ((64, 256, 12.20), (256, 1024, 12.27)):
        yield Row(
            f"MaxText Llama 3.1 70B, tpu7x-{2 * chips}",
            f"{_SOURCE}ironwood/README.md and llama3.1-70b/8k-bf16-*",
            (
                *(*_LLAMA3_70B, f"train.remat=[attention,{_QKV}]", _SMALL_MOMENTS),
                *(f"data.batch_size={rows}", f"target=tpu7x-{2 * chips}"),
            ),
            tokens=rows * 8192 / chips / seconds,
            differs=f"{_SECOND_MOMENTS}; {_BLOCKS}",
        )
    yield Row(
        "MaxText Llama 3.1 70B, 131,072 tokens, tpu7x-512",
        f"{_SOURCE}ironwood/README.md and llama3.1-70b/128k-bf16-tpu7x-4x8x8",
        (
            *("model=llama3_70b", "data.sequence_length=131072", "mesh=fsdp"),
            *("mesh.context=8", "mesh.context_attention=all_gather"),
            *(f"train.remat=[attention,{_QKV}]", "data.batch_size=64"),
            "target=tpu7x-512",
        ),
        tokens=64 * 131072 / 256 / 34.02,
        differs=_BLOCKS,
    )
    yield Row(
        "MaxText Llama 3.1 405B, tpu7x-512",
        f"{_SOURCE}ironwood/README.md and llama3.1-405b/8k-bf16-tpu7x-4x8x8",
        (
            *(*_LLAMA3_405B, "train.remat=[key,value]", "train.offload=[residual]"),
            *(_SMALL_MOMENTS, "data.batch_size=1536", "target=tpu7x-512"),
        ),
        tokens=1536 * 8192 / 256 / 98.34,
        differs=f"{_SECOND_MOMENTS}; {_BLOCKS}",
        chip=_HOST,
    )


LLAMA_ROWS = (
    *_v6e(),
    *_tpu7x(),
    Row(
        "MaxText Llama 3.1 405B, v5p-1024",
        f"{_SOURCE}v5p/Llama3.1-405B-MaxText/README.md; keys: AI-Hypercomputer/maxtext "
        "at 3eb77db, benchmarks/maxtext_v5p_model_configs.py",
        (
            *(*_LLAMA3_405B, "train.remat=[attention]", "train.offload=[attention]"),
            *("data.batch_size=1024", "target=v5p-1024"),
        ),
        tokens=124.618,
        differs=_BLOCKS,
    ),
)
