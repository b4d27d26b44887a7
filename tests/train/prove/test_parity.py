"""A fault of the parallel program is found, and its location and cause are named."""

import functools

import jax
import pytest

from tests.train.prove.mutations import CUBE, DENSE, MUTATIONS, Mutation
from train.prove.divided_step import DividedStep
from train.prove.forward_order import forward_order
from train.prove.parity import Reference, find_cause

FAST = {"targets of one shard only"}
ROWS = ("data.sequence_length=32", "data.batch_size=8", "model.vocab_size=24")


@pytest.fixture(scope="module")
def reference(configure):
    """Return the steps of one device, which are computed before a fault is planted."""

    @functools.cache
    def reference(model: tuple[str, ...]) -> Reference:
        return Reference(DividedStep(configure([*model, *ROWS])), jax.devices())

    return reference


@pytest.fixture
def compare(configure, reference):
    """Return a function that compares a model's steps on a mesh with one device's."""

    def compare(model, mesh):
        overrides = [
            override if "." in override else f"mesh.{override}"
            for override in mesh.split()
        ]
        config = configure([*model, *ROWS, *overrides])
        return reference(model).compare(DividedStep(config))

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
    assert comparison.failures
    assert str(comparison.failures[0]).startswith(mutation.first)
    assert comparison.cause
    assert {*comparison.cause} <= {*mutation.cause}


def test_a_right_program_is_proved(compare):
    comparison = compare(DENSE, CUBE)
    assert not comparison.failures
    assert not comparison.cause
    quantities = {difference.key.quantity for difference in comparison.differences}
    assert quantities >= {"counts", "loss", "gradient", "update", "optimizer"}


@pytest.mark.parametrize(
    ("differs", "cause"),
    [
        (lambda mesh: mesh.fsdp > 1, ("fsdp",)),
        (lambda mesh: mesh.fsdp > 1 and mesh.tensor > 1, ("fsdp", "tensor")),
        (lambda mesh: mesh.data > 1 or mesh.tensor > 1, ("data", "tensor")),
        (lambda mesh: True, ("data", "fsdp", "tensor")),
    ],
)
def test_the_cause_is_found_by_switching_axes_off(configure, differs, cause):
    step = DividedStep(configure(["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]))
    assert find_cause(step, lambda step: differs(step.config.mesh)) == cause


def test_a_parameter_without_a_gradient_is_named(configure):
    # The softmax is the same for any bias of keys, if positions are not rotated.
    overrides = "model=gpt2_nano", "model.num_layers=1", "model.embed_dim=16", *ROWS
    reference = Reference(DividedStep(configure([*overrides])), jax.devices())
    assert reference.no_gradient == ("layers.0.0.attention.key.bias",)


def test_parameters_are_in_the_order_of_the_forward_pass(configure):
    config = configure(["model=gpt_oss_nano", "model.num_layers=2", *ROWS])
    names = [n.removeprefix("layers.0.0.") for n in forward_order(config.model)]
    assert names[:2] == ["embedding.weight", "attention_norm.scale"]
    assert names[-2:] == ["norm.scale", "head.weight"]
    inner = names.index("attention.output.weight")
    assert names.index("attention.query.weight") < inner < names.index("mlp.up")
    assert names.index("mlp.router.weight") < names.index("mlp.up")
    assert names.index("mlp.up") < names.index("mlp.down")
