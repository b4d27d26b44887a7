"""A gated delta net on any mesh: its gradients are those of one device."""

import pytest

from tests.train.conftest import distance

# Rounding is amplified where keys of few dims are normalised.
MODEL = (
    *("model.mixer=gated_delta", "model.num_layers=2", "model.embed_dim=16"),
    *("model.delta_key_dim=16", "model.delta_value_heads=8"),
)
RING, ALL_GATHER = "context_attention=ring", "context_attention=all_gather"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "data=2 fsdp=2 tensor=2",
        f"context=4 fsdp=2 {RING}",  # A device has two pieces of a row,
        f"context=4 tensor=2 {ALL_GATHER}",  # or one.
        f"pipeline=2 context=2 fsdp=2 {RING}",
    ],
)
def test_gradients_are_those_of_one_device(gradients, mesh):
    loss, grads, _ = gradients(*MODEL, "mesh=single", devices=1)
    found = gradients(*MODEL, *(f"mesh.{word}" for word in mesh.split()))
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5
