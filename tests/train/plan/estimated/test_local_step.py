"""One device's share of a program."""

import pytest

from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan.estimated.local_step import is_muons, share_of, sides
from train.program import make_program

D, N, F, V = 64, 8, 256, 512
SHAPE = (
    *("model=llama3_1b", "model.num_layers=4", f"model.embed_dim={D}"),
    *(f"model.num_heads={N}", "model.num_kv_heads=4", f"model.mlp_dim={F}"),
    *(f"model.vocab_size={V}", "data.sequence_length=128", "data.batch_size=32"),
    *("model.attention=xla", "optimizer=adamw", "tracker=none"),
)


@pytest.fixture
def share(composed, monkeypatch):
    monkeypatch.setattr(
        "train.hardware.devices.importlib.util.find_spec", lambda name: None
    )

    def share(*overrides, target="v5e-8"):
        config = composed(*SHAPE, *overrides)
        return share_of(make_program(config, fake_devices(parse_target(target))))

    return share


def test_tensor_cuts_what_a_device_computes_and_fsdp_what_it_holds(share):
    half = share("mesh=fsdp_tensor", "mesh.tensor=2", "train.accumulation_steps=2")
    model = half.model
    assert (model.num_heads, model.kv_heads, model.mlp_size) == (4, 2, 128)
    assert (model.vocab_size, model.head_size, half.rows) == (256, 8, 4)
    up = half.weight("layers.mlp.up.weight")
    assert up.whole == (4, 64, 256)
    assert up.shard == (4, 16, 128)
    assert up.used == (4, 64, 128)
    assert (up.held, up.gathered) == (("fsdp", "tensor"), ("fsdp",))
    assert half.head is half.weight("embedding.weight")
    assert half.head.used == (256, 64)


def test_copies_hold_and_use_all(share):
    whole = share("mesh=ddp")
    assert all(w.whole == w.shard == w.used and not w.held for w in whole.weights)
    assert (whole.rows, whole.tokens) == (4, 4 * 128)


@pytest.mark.parametrize(
    ("overrides", "axes"),
    [
        (("mesh=ddp",), ()),  # eight devices do not divide four layers
        (("mesh=fsdp", "mesh.data=4"), ("data",)),
        (("mesh=fsdp", "mesh.data=2"), ("data",)),
        (("mesh=fsdp_tensor", "mesh.tensor=4"), ("fsdp",)),
    ],
)
def test_muon_takes_the_axes_that_divide_the_layers(share, overrides, axes):
    assert share(*overrides).spread == axes


def test_muons_matrices_have_two_sides(share):
    weights = {w.name: w for w in share("mesh=ddp").weights}
    output = weights["layers.attention.output.weight"]
    assert output.whole == (4, 8, 8, 64)
    assert sides(output) == (64, 64)
    assert sides(weights["layers.mlp.down.weight"]) == (64, 256)
    assert not is_muons(weights["embedding.weight"])
    assert not is_muons(weights["layers.mlp_norm.scale"])
