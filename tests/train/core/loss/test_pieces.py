"""The loss in vocabulary pieces has the sums and the gradients of tiles."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.batches import Order
from model.catalog import MODEL_PARTS
from model.config import ModelConfig
from model.execution import Execution, Numerics
from model.gpt import GPT, params_of
from tests.train.conftest import distance
from train.core.feed import place
from train.core.loss import loss as loss_module
from train.core.loss.form import LossForm, LossOptions
from train.core.loss.pieces import sum_pieces
from train.core.loss.tiles import sum_tiles
from train.core.loss.token_loss import CrossEntropy
from train.core.step import make_gradients

V = 384
N = 16
Z_LOSS = 0.1
PIECES = LossForm(N // 2, ids=160)  # The third piece overlaps the second by 96 ids.


class Inputs(NamedTuple):
    """Features x [N, D], a weight [D, V] and targets [N]."""

    x: np.ndarray
    weight: np.ndarray
    targets: np.ndarray


class Result(NamedTuple):
    """The loss, the nats and the gradients of features x [N, D] and of a weight."""

    loss: np.ndarray
    nats: np.ndarray
    dx: np.ndarray
    dweight: np.ndarray


def compute(
    form: LossForm,
    inputs: Inputs,
    *,
    tied: bool = False,
    cap: float | None = None,
    num_tokens: int = V,
    dtype: str = "float32",
) -> Result:
    """Compute the loss of two rows in a form, on one device."""
    x, weight, targets = inputs
    D = x.shape[1]
    config = ModelConfig(vocab_size=V, embed_dim=D, tied_head=tied, logit_soft_cap=cap)
    execution = Execution(Numerics(compute_dtype=jnp.dtype(dtype)))
    token_loss = CrossEntropy(Z_LOSS)
    options = LossOptions(form, config, execution, (), num_tokens, token_loss)

    @jax.jit
    def run(x_BTD: jax.Array, head: jax.Array, targets_BT: jax.Array):
        if form.ids is not None:
            return sum_pieces(options, x_BTD, head, targets_BT)
        head = options.gather(head)
        return sum_tiles(options, x_BTD, head, targets_BT, gradients=True)

    sums, (dx, dhead) = jax.device_get(
        run(
            jnp.asarray(x, jnp.float32).reshape(2, -1, D),
            jnp.asarray(weight.T if tied else weight, jnp.float32),
            jnp.asarray(targets).reshape(2, -1),
        )
    )
    return Result(*sums, dx.reshape(x.shape), dhead.T if tied else dhead)


def reference(
    inputs: Inputs,
    cap: float | None = None,
    num_tokens: int = V,
    **_: Any,
) -> Result:
    """Compute the loss and its gradients in float64."""
    x = inputs.x.astype(np.float64)
    weight = inputs.weight.astype(np.float64)
    targets = inputs.targets
    raw = x @ weight
    logits = raw if cap is None else cap * np.tanh(raw / cap)
    logits[:, num_tokens:] = -np.inf
    largest = logits.max(axis=1, keepdims=True)
    log_z = largest + np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    counts = targets[:, None] >= 0
    is_target = targets[:, None] == np.arange(logits.shape[1])
    nats = np.where(counts, log_z, 0).sum() - logits[is_target].sum()
    dlogits = counts * (1 + 2 * Z_LOSS * log_z) * np.exp(logits - log_z) - is_target
    if cap is not None:
        dlogits *= 1 - np.tanh(raw / cap) ** 2
    loss = nats + Z_LOSS * (counts * log_z**2).sum()
    return Result(loss, nats, dlogits @ weight.T, x.T @ dlogits)


def draw_targets(num_tokens: int = V) -> np.ndarray:
    """Return targets in each piece; three tokens have none."""
    targets = np.random.default_rng(0).integers(0, num_tokens, N)
    targets[:4] = 0, min(num_tokens, 160) - 1, min(num_tokens, 224) - 1, num_tokens - 1
    targets[[5, 9, 15]] = -1
    return targets


def check(actual: Result, expected: Result, rtol: float) -> None:
    """Check each sum and gradient, with the error relative to the expected norm."""
    for name, value, expected_value in zip(
        Result._fields, actual, expected, strict=True
    ):
        error = np.linalg.norm(np.float64(value) - expected_value)
        assert error <= rtol * np.linalg.norm(expected_value), (name, error)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "num_tokens",
    [V, 350, 300],  # The last piece adds 64 ids. All, some or none of them are valid.
)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_pieces_have_the_loss_and_the_gradients_of_tiles(tied, num_tokens, cap):
    random = np.random.default_rng(1)
    x = random.standard_normal((N, 24))
    inputs = Inputs(x, random.standard_normal((24, V)), draw_targets(num_tokens))
    options = {"tied": tied, "num_tokens": num_tokens, "cap": cap}
    result = compute(PIECES, inputs, **options)
    check(result, compute(LossForm(4), inputs, **options), rtol=2e-6)
    check(result, reference(inputs, **options), rtol=2e-6)
    assert (result.dweight[:, num_tokens:] == 0).all()
    assert (result.dx[5] == 0).all()  # Token 5 has no target.


def draw_sharp_logits() -> np.ndarray:
    """Return logits where one id of each token, in varying pieces, is far above all."""
    logits = np.random.default_rng(2).standard_normal((N, V))
    logits[np.arange(N), (100 * np.arange(N)) % V] += 100
    return logits


LOGITS = {
    "one above all": draw_sharp_logits(),
    "all equal": np.full((N, V), 7.0),
    "wide": np.random.default_rng(3).uniform(-200, 200, (N, V)),
    "rising": np.tile(np.linspace(-200, 200, V), (N, 1)),
    "falling": np.tile(np.linspace(200, -200, V), (N, 1)),
}


@pytest.mark.parametrize("cap", [None, 30.0, 200.0])
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_pieces_are_accurate_for_extreme_logits(logits, cap):
    """The features are the identity, so that the weight holds the logits.

    A piece without valid ids and exponentials that are zero must change nothing.
    Logits near 200 have errors of 1e-5 in float32.
    """
    for num_tokens in (V, 200):
        inputs = Inputs(np.eye(N), logits, draw_targets(num_tokens))
        options = {"cap": cap, "num_tokens": num_tokens}
        result = compute(PIECES, inputs, **options)
        check(result, compute(LossForm(4), inputs, **options), rtol=3e-5)
        check(result, reference(inputs, **options), rtol=3e-5)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_bfloat16_costs_pieces_hardly_more_than_tiles(scale, cap):
    """The reference is float64, from operands that bfloat16 holds exactly."""
    random = np.random.default_rng(4)
    D = 64

    def draw(*shape: int) -> np.ndarray:
        return np.float64(jnp.asarray(random.standard_normal(shape), jnp.bfloat16))

    inputs = Inputs(draw(N, D) * 2.0**-2, draw(D, V) * scale, draw_targets())
    expected = reference(inputs, cap=cap)
    pieces, tiles = (
        compute(form, inputs, cap=cap, dtype="bfloat16")
        for form in (PIECES, LossForm(4))
    )
    for name in ("dx", "dweight"):
        exact = getattr(expected, name)
        error, tile_error = (
            np.linalg.norm(getattr(result, name) - exact) / np.linalg.norm(exact)
            for result in (pieces, tiles)
        )
        assert error <= 1.5 * tile_error


@pytest.fixture
def gradients(programs, store, monkeypatch):
    """Return a function (form, overrides, devices) -> (loss, gradients) of a step."""

    def gradients(form: LossForm, overrides: Sequence[str], devices: int):
        monkeypatch.setattr(loss_module, "choose_form", lambda *_: form)
        program = programs(["model.num_layers=1", *overrides], devices=devices)
        model = program.model
        execution = program.execution
        sharded_dims = execution.weight_placement(model.head_axes).sharded_dims
        assert bool(sharded_dims) == (devices > 1)
        batch = Order(store, program.config.data, 0).read(0)
        assert (batch.targets < 0).any()
        step = make_gradients(model, execution, program.recipe, num_tokens=257)
        params = params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))
        params = jax.device_put(params, program.shardings.params)
        results = jax.jit(step)(params, place(batch, program.batch))
        return jax.device_get(results[:2])

    return gradients


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_in_pieces_equals_one_in_tiles_on_any_mesh(gradients, tied):
    """Devices scatter the gradient of each piece. Some ids only pad the vocabulary."""
    overrides = f"model.tied_head={tied}", "train.z_loss=0.1", "model.logit_soft_cap=20"
    expected = gradients(LossForm(8), overrides, devices=1)
    for devices, mesh in (
        (4, ("mesh.fsdp=2", "mesh.context=2")),
        (8, ("mesh.data=2", "mesh.fsdp=4")),
        (4, ("mesh.data=2", "mesh.fsdp=2", "train.accumulation_steps=2")),
        (8, ("mesh.fsdp=8",)),
    ):
        result = gradients(LossForm(8, ids=160), [*overrides, *mesh], devices=devices)
        assert distance(result, expected) <= 1e-5, mesh
