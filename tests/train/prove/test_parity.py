"""A fault of the parallel program is found, and its place and its cause are named."""

import functools

import jax
import pytest

from tests.train.prove.mutations import CUBE, DENSE, MUTATIONS, Mutation
from train.prove.parity import (
    Reference,
    compare_with_one_device,
    measure_gradients,
    measure_steps,
)

FAST = {"no sum of scales", "load of one shard", "norm of a shard"}
ROWS = ("data.sequence_length=32", "data.batch_size=8", "model.vocab_size=24")


@pytest.fixture(scope="module")
def reference(configure):
    """Give the steps of one device, computed before anything is broken."""

    @functools.cache
    def reference(model: tuple[str, ...]) -> Reference:
        config = configure(*model, *ROWS)
        reference = Reference(config, jax.devices())
        for measure in (measure_gradients, measure_steps):
            reference.values(measure)
        return reference

    return reference


@pytest.fixture
def compare(configure, reference):
    """Compare a model on a mesh with one device."""

    def compare(model, mesh):
        words = [word if "." in word else f"mesh.{word}" for word in mesh.split()]
        config = configure(*model, *ROWS, *words)
        return compare_with_one_device(config, jax.devices(), reference(model))

    return compare


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(m, id=m.name, marks=[] if m.name in FAST else [pytest.mark.slow])
        for m in MUTATIONS
    ],
)
def test_a_fault_is_found_and_its_cause_is_named(
    compare, reference, monkeypatch, mutation: Mutation
):
    reference(mutation.model)
    mutation.patch(monkeypatch)
    jax.clear_caches()
    comparison = compare(mutation.model, mutation.mesh)
    monkeypatch.undo()
    jax.clear_caches()
    assert comparison.wrong
    assert str(comparison.wrong[0].key).startswith(mutation.first)
    assert comparison.cause
    assert {*comparison.cause} <= {*mutation.cause}


def test_a_right_program_is_proved(compare):
    comparison = compare(DENSE, CUBE)
    assert not comparison.wrong
    assert not comparison.cause
    quantities = {difference.key.quantity for difference in comparison.differences}
    assert quantities >= {"counts", "loss", "gradient", "update", "optimizer"}
