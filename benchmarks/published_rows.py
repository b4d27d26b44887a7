"""Published runs on TPUs, and the closest keys of `python -m train.plan`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from train.hardware.achievable import GroupedRates

_MAXTEXT = (
    *("model=llama3_8b", "model.vocab_size=32000", "model.head_dim=128"),
    *("data.sequence_length=2048",),
)
_64_HEADS = ("model.num_heads=64", "model.num_kv_heads=64", "model.mlp_dim=28672")
_16B = (*_MAXTEXT, *_64_HEADS, "model.embed_dim=4096")
_32B = (*_MAXTEXT, *_64_HEADS, "model.embed_dim=8192")
_64B = (*_32B, "model.num_layers=64")
_128B = (
    *(*_MAXTEXT, "model.num_heads=128", "model.num_kv_heads=128"),
    *("model.mlp_dim=57344", "model.embed_dim=8192", "model.num_layers=64"),
    *("mesh=fsdp_tensor", "mesh.tensor=16", "mesh.activations.embed=tensor"),
)
_22B = (
    *_MAXTEXT,
    *("model.num_heads=24", "model.num_kv_heads=24", "model.mlp_dim=24576"),
    *("model.embed_dim=6144", "model.num_layers=48"),
)
LLAMA3_8B = ("model=llama3_8b", "data.sequence_length=8192")
# The results that MaxText's recipes for v6e offload instead of recomputing them.
_PROJECTIONS = "query,key,value,attention_output"
OFFLOADED = f"train.remat=[{_PROJECTIONS}]", f"train.offload=[residual,{_PROJECTIONS}]"
_MIXTRAL = ("model=mixtral_8x7b", "mesh=fsdp", "data.sequence_length=4096")
# Experts with a capacity factor of 1.25 multiply 1.25 times as many rows. The one-hot
# products that bring 4,096 tokens to experts and back add 2 x 4,096 / (3 x 14,336) of
# the experts' FLOPs. All these products are dense, without tiles of grouped rows.
_DROPPED = GroupedRates(rate=1 / (1.25 * (1 + 2 * 4096 / (3 * 14336))))
RECIPES_AT = "AI-Hypercomputer/tpu-recipes at "
MAXTEXT_AT = "AI-Hypercomputer/maxtext at e591f30, src/maxtext/configs/"
OWN_FLAGS = "its own XLA flags"


@dataclass(frozen=True)
class Row:
    """A published run.

    flops, tokens: the published speed: model FLOPs or tokens per second and chip.
    date: year and month of the published speed, if the source states them.
    differs: what the keys cannot express.
    kept: pairs of a number of slices, and the speed per chip relative to one slice.
    chip: rates of the run that differ from those in train/hardware/chips.py.
    use: "settled on" if a constant of train/hardware/achievable.py is fitted to this
        row, "judged by" if the row validates the constants.
    """

    name: str
    source: str
    overrides: tuple[str, ...]
    flops: float | None = None
    tokens: float | None = None
    date: str = ""
    differs: str = OWN_FLAGS
    kept: tuple[tuple[int, float], ...] = ()
    chip: dict[str, Any] = field(default_factory=dict)
    use: str = "judged by"


# MFU in percent on 1, 2, 4, 8, 16 and 32 slices of v5e-256; the other fields are name,
# keys and rows per chip. The cost of more slices (train/hardware/achievable.py) is
# fitted to 2, 8 and 32 slices, and 4 and 16 slices validate it.
_SLICES = (1, 2, 4, 8, 16, 32)
_ON_SLICES = (
    ("16B", (*_16B, "mesh=fsdp"), 6, (61.10, 59.37, 59.14, 58.27, 56.56, 54.65)),
    ("32B", (*_32B, "mesh=fsdp"), 4, (66.86, 64.81, 64.10, 63.67, 62.26, 60.40)),
    ("64B", (*_64B, "mesh=fsdp"), 2, (59.90, 56.66, 55.85, 54.96, 53.29, 50.18)),
    ("128B", _128B, 1, (56.06, 55.82, 54.93, 52.93, 50.86, 46.25)),
)


def _two_slices() -> Iterator[Row]:
    """Yield runs on two slices, with the speeds on 2 to 32 slices in `kept`."""
    for size, model, rows, mfu in _ON_SLICES:
        yield Row(
            f"MaxText {size}, 2 x v5e-256",
            f"{MAXTEXT_AT}tpu/v5e/{size.lower()}.sh, README.md",
            (
                *(*model, "mesh.data=2", "mesh.dcn.data=2", "train.remat=full"),
                *(f"data.batch_size={2 * 256 * rows}", "target=v5e-256x2"),
            ),
            flops=mfu[1] / 100 * 197e12,
            kept=tuple(zip(_SLICES[1:], [of / mfu[0] for of in mfu[1:]], strict=True)),
        )


_ON_ONE_SLICE = (  # name, target, keys, global batch size, FLOP/s per chip
    ("16B", "v5e-256", _16B, 1536, 120e12),
    ("32B", "v5e-256", _32B, 1024, 132e12),
    ("22B", "v4-128", _22B, 832, 156e12),
)


def _one_slice() -> Iterator[Row]:
    for size, target, model, rows, flops in _ON_ONE_SLICE:
        yield Row(
            f"MaxText {size}, {target}",
            f"{MAXTEXT_AT}tpu/{target.partition('-')[0]}/{size.lower()}.sh, README.md",
            (
                *(*model, "mesh=fsdp", "train.remat=full"),
                *(f"data.batch_size={rows}", f"target={target}"),
            ),
            flops=flops,
        )


TPU_ROWS = (
    *_one_slice(),
    Row(
        "MaxText 32B, v5p-128",
        MAXTEXT_AT + "tpu/v5p/32b.sh, README.md",
        (
            *(*_32B, "mesh=fsdp_tensor", "mesh.tensor=4", "train.remat=dots"),
            *("mesh.activations.embed=tensor", "data.batch_size=384", "target=v5p-128"),
        ),
        flops=328e12,
    ),
    Row(
        "MaxText Mixtral 8x7B, v5p-128",
        "AI-Hypercomputer/maxtext at 48445cf, end_to_end/tpu/mixtral/Run_Mixtral.md; "
        "rows: tpu-recipes at 92f03ef, training/v5p/Mixtral-8X7B-Maxtext",
        (*_MIXTRAL, "train.remat=full", "data.batch_size=2304", "target=v5p-128"),
        flops=251.94e12,
        differs=f"weights of bfloat16; tiles of 512 x 1024 x 1024; {OWN_FLAGS}",
        use="settled on",
    ),
    Row(
        "MaxText Mixtral 8x7B, v5p-512",
        "AI-Hypercomputer/maxtext, docs, optimized models tiering; keys: benchmarks/"
        "maxtext_v5p_model_configs.py, mixtral_8x7b_dropless_v5p_512",
        (*_MIXTRAL, "train.remat=full", "data.batch_size=9216", "target=v5p-512"),
        tokens=36 * 4096 / 50.7,
        differs=f"tiles of 512 x 1024 x 1024; {OWN_FLAGS}",
    ),
    Row(
        "MaxText Mixtral 8x7B, v6e-256",
        RECIPES_AT + "e008533, training/trillium/Mixtral-8x7B-MaxText/README.md",
        (*_MIXTRAL, *OFFLOADED, "data.batch_size=3072", "target=v6e-256"),
        tokens=12 * 4096 / 13.484,
        differs="experts drop tokens beyond a capacity of 1.25 and are reached by "
        f"one-hot products; larger attention blocks; {OWN_FLAGS}",
        chip={"grouped": _DROPPED},
    ),
    *_two_slices(),
)
