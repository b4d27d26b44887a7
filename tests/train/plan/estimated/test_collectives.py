"""What the loop over the layers sends, against compiled steps."""

import pytest

from tests.train.compiled import D, L
from tests.train.plan.compiled.test_collectives import large, of, payload
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.local_step import local_step

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
            if c.times == L
        ]
        assert payload(fact, leave="norm") == sum(
            e.payload for e in guess if e.kind == kind
        )
    assert {c.kind for c in large(step.collectives) if c.times == L} == {
        e.kind for e in guess
    }
