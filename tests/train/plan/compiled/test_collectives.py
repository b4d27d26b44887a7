"""A compiled step sends what textbooks state, except where XLA departs from them.

Weights are gathered, and their gradients reduced, in bfloat16 (`train.reduce_dtype`).
"""

import pytest

from tests.train.compiled import DOWN, MATRICES, NORMS, B, D, L, T, V
from train.plan.compiled.collectives import Collective, sum_collectives

BF16 = 2
F32 = 4
LARGE_DOWN = 512 * 1024
LARGE_MATRICES = 4 * 512 * 512 + 3 * LARGE_DOWN  # LARGE has these in each layer.


def of(collectives: list[Collective], scope: str, kind: str) -> list[Collective]:
    """Return the collectives of one scope and kind."""
    return [c for c in collectives if (c.scope, c.kind) == (scope, kind)]


def payload(collectives: list[Collective], *uses: str, leave: str = "scalars") -> int:
    """Return the bytes a step sends for `uses`, or for all uses except `leave`."""
    return sum(
        c.count * share
        for c in collectives
        for use, share in c.uses
        if (use in uses if uses else use != leave)
    )


def large(collectives: list[Collective]) -> list[Collective]:
    """Return the collectives of matrices and activations, not of norms or scalars."""
    return [c for c in collectives if c.payload > 8 * NORMS]


class TestData:
    @pytest.fixture
    def step(self, stored_step):
        return stored_step("ddp")

    def test_each_gradient_is_reduced_once(self, step):
        size = BF16 * (L * MATRICES + 2 * V * D) + F32 * NORMS
        (row,) = sum_collectives(step.collectives)
        assert (row.axes, row.network, row.kind) == (("data",), "ICI", "all-reduce")
        assert payload(step.collectives) == size
        assert row.payload - size <= 64  # loss, norm, number of targets
        assert row.sent == pytest.approx(2 * 7 / 8 * row.payload)

    def test_a_layer_is_one_all_reduce_in_the_loop(self, step):
        (layer,) = of(step.collectives, "layers backward", "all-reduce")
        assert layer.count == L
        assert payload([layer], leave="norm") == L * BF16 * MATRICES
        assert dict(layer.uses)["mlp.down"] == BF16 * DOWN

    def test_a_tied_table_is_reduced_once(self, stored_step):
        """The look-up's gradient and the head's are added first."""
        step = stored_step("ddp_tied")
        size = BF16 * (L * MATRICES + V * D) + F32 * NORMS
        assert payload(step.collectives) == size


class TestFsdp:
    @pytest.fixture
    def step(self, stored_step):
        return stored_step("fsdp")

    @pytest.mark.parametrize("way", ["forward", "backward"])
    def test_a_layer_gathers_its_matrices_rounded(self, step, way):
        gathers = of(step.collectives, f"layers {way}", "all-gather")
        assert {c.count for c in gathers} == {L}
        assert payload(gathers) == L * BF16 * MATRICES
        assert payload(gathers, "mlp.down") == L * BF16 * DOWN
        assert payload(gathers, "mlp.up", "mlp.gate") == 2 * L * BF16 * DOWN

    def test_gradients_of_a_layer_are_reduced_and_scattered_rounded(self, step):
        scatters = of(step.collectives, "layers backward", "reduce-scatter")
        assert payload(scatters) == L * BF16 * MATRICES
        assert payload(scatters, "mlp.down") == L * BF16 * DOWN

    def test_the_head_travels_once_however_many_tiles_the_loss_has(self, stored_step):
        step = stored_step("fsdp_tiles")
        head = [c for c in step.collectives if "head" in dict(c.uses)]
        gather, scatter = sorted(head, key=lambda c: c.kind)
        assert (gather.kind, gather.count) == ("all-gather", 1)
        assert payload([gather], "head") == BF16 * V * D
        assert (scatter.kind, scatter.count) == ("reduce-scatter", 1)
        assert payload([scatter], "head") == BF16 * V * D


def test_sparse_cores_gather_and_scatter_while_products_run(stored_step):
    """XLA does neither on v6e by default (docs/log)."""
    step = stored_step("sparse_cores")
    # The rows are short, so that products hide only a part.
    for kind, share in (("all-gather", 0.6), ("reduce-scatter", 0.4)):
        collectives = [c for c in large(step.collectives) if c.kind == kind]
        assert all(c.is_async for c in collectives)
        (row,) = sum_collectives(collectives)
        assert row.overlapped > share


class TestSparseCoreCalls:
    """The start of a call names the collective, and its update passes the operand."""

    @pytest.fixture
    def step(self, stored_step):
        return stored_step("sparse_core_calls")

    @pytest.mark.parametrize(
        ("way", "kind"),
        [
            ("forward", "all-gather"),
            ("backward", "all-gather"),
            ("backward", "reduce-scatter"),
        ],
    )
    def test_each_matrix_of_a_layer_travels_once_for_its_part(self, step, way, kind):
        layers = of(step.collectives, f"layers {way}", kind)
        assert payload(layers) == L * BF16 * LARGE_MATRICES
        for part in ("mlp.up", "mlp.gate", "mlp.down"):
            assert payload(layers, part) == L * BF16 * LARGE_DOWN
        for part in ("query", "key", "value", "output"):
            assert payload(layers, f"attention.{part}") == L * BF16 * 512 * 512
        assert sum(c.count * c.sent for c in layers) == 15 / 16 * payload(layers)

    def test_products_run_between_the_update_and_the_end(self, step):
        for kind, share in (("all-gather", 0.9), ("reduce-scatter", 0.7)):
            collectives = [c for c in large(step.collectives) if c.kind == kind]
            assert all(
                c.is_async and c.waiter.endswith("call-done") for c in collectives
            )
            (row,) = sum_collectives(collectives)
            assert row.overlapped > share

    def test_one_ring_in_both_directions_uses_two_of_three_links(self, step):
        """The slice is 2 x 2 x 2 chips. XLA's all-reduces use all three dims."""
        links = {(c.kind, c.group.links) for c in step.collectives}
        expected = {("all-gather", 2), ("reduce-scatter", 2), ("all-reduce", 3)}
        assert links == expected


class TestTensor:
    def test_a_layer_reduces_activations_twice_each_way(self, stored_step):
        step = stored_step("tensor_only")
        for way in ("forward", "backward"):
            reduces = large(of(step.collectives, f"layers {way}", "all-reduce"))
            assert [c.count for c in reduces] == [L, L]
            assert {c.payload for c in reduces} == {BF16 * B * T * D}
            assert {c.group.axes for c in reduces} == {("tensor",)}
        in_layers = [c for c in step.collectives if c.scope.startswith("layers")]
        assert {c.kind for c in large(in_layers)} == {"all-reduce"}

    def test_the_head_stays_sharded(self, stored_step):
        """Each device has only its part of the vocabulary, even in a tiled loss."""
        step = stored_step("tensor_tiles")
        head = [c for c in step.collectives if "head" in dict(c.uses)]
        activations, weights = (
            [c for c in head if c.group.axes == (axis,)] for axis in ("tensor", "fsdp")
        )
        assert payload(weights, "head") == 2 * BF16 * V * D // 2
        # These are the gradient of activations, and a sum and a maximum per position.
        assert payload(activations, "head") <= B * T // 4 * (BF16 * D + 3 * F32)


class TestSlices:
    def test_gradient_shards_cross_between_slices(self, stored_step):
        step = stored_step("slices")
        dcn = [c for c in step.collectives if c.group.network == "DCN"]
        assert {c.group.axes for c in dcn} == {("data",)}
        assert {c.kind for c in dcn} == {"all-reduce"}
        assert {c.group.size for c in dcn} == {2}
        assert any(c.is_overlapped for c in dcn if c.count > 1)
        # Heads of 64 fill half of a tile's 128 lanes, and tiles are sent whole.
        shard = BF16 * (L * MATRICES + 2 * V * D) // 4
        assert shard <= payload(large(dcn)) < 1.5 * shard
        ici = [c for c in step.collectives if c.group.network == "ICI"]
        assert {c.group.axes for c in ici} == {("fsdp",)}
        assert {c.group.size for c in ici} == {4}


def test_a_cpu_program_gathers_and_scatters_each_layer(compile_step):
    step = compile_step(["mesh=fsdp", "model.compute_dtype=float32"])
    gathers = of(step.collectives, "layers forward", "all-gather")
    assert payload(large(gathers)) == L * F32 * MATRICES
    scatters = of(step.collectives, "layers backward", "reduce-scatter")
    assert payload(scatters) == L * F32 * MATRICES
    assert {c.group.network for c in step.collectives} == {"memory"}
    assert not any(c.is_async for c in step.collectives)
