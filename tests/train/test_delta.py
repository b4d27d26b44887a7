"""A hybrid on any mesh: its gradients are those of one device."""

import pytest

from tests.train.conftest import distance
from train.errors import ConfigError

# Rounding is amplified where keys of few dims are normalised.
MODEL = (
    *("model=moe_nano", "model.num_layers=8", "model.dense_layers=0"),
    "model.mixer_pattern=[gated_delta,gated_delta,gated_delta,attention]",
    *("model.attention_gate=true", "model.embed_dim=16", "model.expert_dim=8"),
    *("model.num_heads=4", "model.num_kv_heads=2", "model.init=scaled"),
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
    assert [*grads["layers"]] == ["0"]
    assert [*grads["layers"]["0"]] == ["0", "1", "2", "3"]
    found = gradients(*MODEL, *(f"mesh.{word}" for word in mesh.split()))
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5


def test_pieces_of_rows_that_are_shorter_than_a_convolution_are_refused(programs):
    rows = "mesh.context=4", "mesh.data=2", "data.sequence_length=32"
    with pytest.raises(ConfigError, match="must be at least 40"):
        programs(
            *rows, "model.mixer=gated_delta", "model.delta_conv_width=6", devices=8
        )
