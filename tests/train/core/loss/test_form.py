"""The platform, the shapes and the memory decide how logits are divided."""

import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from model.axes import AxisRules
from model.choices import Mlp
from model.execution import Execution, Numerics
from model.placement import Placement
from train.core.loss.form import LossForm, choose_form
from train.resolve.execution import scatters_tables
from train.resolve.sharding import axis_rules

FSDP_256 = {"fsdp": 256}


@pytest.fixture(scope="module")
def form(composed):
    """Return a function that chooses the form for Llama 3 8B with fields changed.

    form(rows=(B, T), **model fields) -> LossForm

    The default mesh is fsdp 256 on TPUs.
    """
    config = composed(["model=llama3_8b"])

    def form(
        rows: tuple[int, int],
        mesh: dict[str, int] = FSDP_256,
        rules: AxisRules | None = None,
        platform: str = "tpu",
        chunk: int | None = None,
        dtype: str = "bfloat16",
        **fields: Any,
    ) -> LossForm:
        model = replace(config.model, **fields)
        abstract_mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
        placement = Placement(abstract_mesh, rules or axis_rules(config.mesh), platform)
        placement = replace(placement, scatters_tables=scatters_tables(placement))
        execution = Execution(Numerics(compute_dtype=jnp.dtype(dtype)), placement)
        return choose_form(model, execution, rows, chunk)

    return form


def test_few_tokens_take_pieces_and_many_take_tiles(form):
    """The exponentials of pieces need too much memory for many tokens.

    In float32 they need twice as much as in bfloat16.
    """
    few_tokens = form((2, 4096))
    assert few_tokens.ids is not None
    assert few_tokens.ids % 128 == 0
    assert str(few_tokens) == f"all positions and {few_tokens.ids:,} ids at once"
    assert form((2, 4096), dtype="float32").ids is None
    assert form((1, 4096), dtype="float32").ids is not None
    many_tokens = form((4, 8192))
    assert many_tokens.ids is None
    assert 128 < many_tokens.positions < 8192
    assert (
        str(many_tokens)
        == f"{many_tokens.positions:,} positions of each row and all ids at once"
    )


def test_a_token_with_many_experts_leaves_room_for_a_large_tile(form):
    """A layer that holds ten rows of a token needs more than the logits of a tile."""
    sizes = {"embed_dim": 2048, "mlp_dim": 512, "expert_dim": 512}
    experts = {**sizes, "mlp": Mlp.moe, "num_experts": 64, "vocab_size": 151936}
    assert form((4, 4096), experts_per_token=1, **experts) == LossForm(128)
    assert form((4, 4096), experts_per_token=10, **experts) == LossForm(1024)


@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 64, "tensor": 4},  # XLA shards the vocabulary.
        {"data": 256},  # The head is replicated.
        {},
    ],
)
def test_only_a_head_that_manual_axes_shard_takes_pieces(form, mesh):
    assert form((2, 4096), mesh).ids is None


def test_a_head_whose_vocabulary_is_sharded_takes_tiles(form, composed):
    config = composed(["mesh.params.vocab=fsdp", "mesh.params.embed=null"])
    assert form((2, 4096), rules=axis_rules(config.mesh)).ids is None


def test_a_tied_head_takes_the_pieces_of_an_untied_one(form):
    assert form((2, 4096), tied_head=True) == form((2, 4096))


@pytest.mark.parametrize(
    ("T", "V", "chunk", "expected"),
    [
        (1024, 384, None, 1024),
        (1000, 50304, None, 125),
        (1024, 384, 100, 64),
        (32, 50304, None, 32),
        (31, 384, 30, 1),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_tile_without_a_tpu_is_a_divisor_of_the_row(
    form, platform, T, V, chunk, expected
):
    result = form((8, T), platform=platform, chunk=chunk, vocab_size=V)
    assert result == LossForm(expected)


@pytest.mark.parametrize("mesh", [{}, FSDP_256])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_an_explicit_chunk_and_a_small_vocabulary_take_tiles(form, mesh, platform):
    rows = (2, 4096)
    assert form(rows, mesh, platform=platform, chunk=1000) == LossForm(512)
    assert form(rows, mesh, platform=platform, vocab_size=8191) == LossForm(4096)


def bytes_of(form: LossForm, shape: tuple[int, int, int], V: int) -> float:
    """Count the bytes of logits, exponentials, the gathered weight and gradients.

    Pieces sum the gradient of x in float32; only what this adds to tiles is counted.
    With pieces, a device has the gradient of 1/256 of the weight.
    """
    B, T, D = shape
    N = B * T
    weight = 2 * D * V
    if form.ids is None:
        return weight + 4 * D * V + 4 * B * form.positions * V
    return weight + 4 * D * V / 256 + 2 * N * D + 4 * N * form.ids + 2 * N * V


def test_no_form_needs_more_memory_than_small_tiles_or_a_layer(form):
    """Tiles of 128 positions are small. A layer holds six arrays of each width.

    Pieces may need a tenth more, for their logits and the float32 gradient of x.
    """
    kinds = set()
    for V, B, T, D, mlp_per_D in itertools.product(
        (8192, 50257, 128256, 262144),
        (1, 2, 3, 16),
        (128, 1024, 4000, 8192),
        (512, 2048, 4096, 8192),
        (2, 4),
    ):
        F = mlp_per_D * D
        result = form((B, T), vocab_size=V, embed_dim=D, mlp_dim=F)
        small_tiles = LossForm(max(c for c in range(1, 129) if T % c == 0))
        small_bytes = bytes_of(small_tiles, (B, T, D), V)
        layer_bytes = 6 * 2 * B * T * (F + D)
        limit = (1.1 if result.ids else 1) * max(small_bytes, layer_bytes)
        assert T % result.positions == 0
        assert result.positions >= small_tiles.positions
        assert bytes_of(result, (B, T, D), V) <= limit, (V, B, T, D, F, result)
        kinds.add(
            "pieces" if result.ids else "small" if result == small_tiles else "large"
        )
    assert kinds == {"pieces", "small", "large"}


@pytest.mark.parametrize("V", [8192, 32000, 50257, 128256, 151936, 262144])
@pytest.mark.parametrize("D", [512, 4096, 8192])
def test_pieces_overlap_little(form, V, D):
    ids = form((1, D), vocab_size=V, embed_dim=D).ids
    assert ids is not None
    assert -(-V // ids) * ids <= 1.06 * V
