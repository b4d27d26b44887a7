"""What the loop over the layers sends, against compiled steps."""

import collections
from unittest import mock

import pytest

from tests.train.compiled import SHAPE, B, D, L, N, T
from tests.train.plan.compiled.test_collectives import large, of, payload
from train.hardware import devices
from train.hardware.targets import parse_target
from train.plan.cost import sent_bytes
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.local_step import local_step
from train.program import make_program

F32 = 4


def estimated(step) -> list[Exchange]:
    sent = local_step(step.program).exchanges
    return [e for e in sent if e.in_layers and e.payload > 8 * F32 * (2 * L + 1) * D]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor_only"])
def test_the_loop_over_the_layers_sends_what_was_estimated(stored_step, name):
    """Of matrices and activations, exactly; XLA sends small vectors as it likes."""
    step = stored_step(name)
    guess = estimated(step)
    assert guess
    for kind in {e.kind for e in guess}:
        fact = [
            c
            for way in ("forward", "backward")
            for c in of(step.collectives, f"layers {way}", kind)
            if c.count == L
        ]
        assert payload(fact, leave="norm") == sum(
            e.payload for e in guess if e.kind == kind
        )
    assert {c.kind for c in large(step.collectives) if c.count == L} == {
        e.kind for e in guess
    }


@pytest.mark.slow
def test_a_ring_sends_keys_on_and_weights_are_gathered_as_along_fsdp(composed):
    """Sixteen chips gather by rows and columns: as many bytes as in one step."""

    def sent(mesh):
        config = composed(*SHAPE, "model.attention=xla", "mesh.fsdp=1", mesh)
        with mock.patch.object(devices.importlib.util, "find_spec", return_value=None):
            chips = devices.fake_devices(parse_target("v5p-32"))
        found = local_step(make_program(config, chips)).exchanges
        sent = collections.defaultdict[str, float](float)
        for e in found:
            size = len(e.members) or 16
            sent[e.kind] += sent_bytes(e.kind, e.payload, size) if e.in_layers else 0
        return sent

    ring, sharded = sent("mesh.context=16"), sent("mesh.fsdp=16")
    assert ring["all-gather"] == pytest.approx(sharded["all-gather"], rel=1e-3)
    chunk = B * T // 16
    keys, documents = 2 * chunk * D, 4 * chunk  # and as many values; heads x dim is D
    forward = 15 * (2 * keys + documents)
    home = 16 * 2 * (2 * keys)  # the gradients of both, in float32
    assert N * 64 == D
    wanted = L * (2 * forward + home)  # documents are the same in all layers
    assert ring["collective-permute"] == pytest.approx(wanted, rel=2e-3)
    assert not sharded["collective-permute"]


def test_rows_travel_to_their_experts_and_back(composed):
    """Forward both ways, there once more for the backward pass, then both gradients.

    So does the compiled step (docs/log); TPUs send a weight as a whole vector.
    """
    shape = ("model=moe_nano", "model.num_layers=3", "model.vocab_size=256")
    mesh = ("mesh.fsdp=1", "mesh.expert=8", "train.remat=full", "tracker=none")
    data = ("data.batch_size=16", "data.sequence_length=128", "model.attention=xla")
    config = composed(*shape, *mesh, *data)
    with mock.patch.object(devices.importlib.util, "find_spec", return_value=None):
        chips = devices.fake_devices(parse_target("v5e-8"))
    found = local_step(make_program(config, chips)).exchanges
    sent = sum(e.payload for e in found if e.kind == "ragged-all-to-all")
    rows, width = 2 * 128 * 3, 128
    assert sent == 2 * rows * (5 * 2 * width + 3 * 4 * 128)
