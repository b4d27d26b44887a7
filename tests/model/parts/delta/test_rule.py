"""The chunked gated delta rule agrees with its recurrence and with transformers."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.parts.delta.rule import DeltaInputs, delta_rule
from tests.model.reference import recurrence

pytestmark = pytest.mark.usefixtures("strict")

B = 2
K = 2
R = 2
H = 16
V = 12


class Case(NamedTuple):
    """A case sets how much keys differ, and how strongly a token decays the state."""

    noise: float
    decay: float


CASES = {
    "usual": Case(noise=np.inf, decay=0.1),
    "similar": Case(noise=0.1, decay=0.1),
    "equal": Case(noise=0.0, decay=0.1),
    "steep": Case(noise=np.inf, decay=20.0),
}


def draw(case: str, length: int) -> DeltaInputs:
    """Draw float32 inputs without starts of documents."""
    rng = np.random.default_rng(1)
    noise, decay = CASES[case]
    q, k = rng.normal(size=(2, B, length, K, H))
    if noise < np.inf:
        k = rng.normal(size=(B, 1, K, H)) + noise * k
    v = rng.normal(size=(B, length, K, R, V))
    g = -decay * np.abs(rng.normal(size=(B, length, K, R)))
    beta = 1 / (1 + np.exp(-rng.normal(size=(B, length, K, R))))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    arrays = (np.float32(x) for x in (q * H**-0.5, k, v, g, beta))
    return DeltaInputs(*map(jnp.asarray, arrays), jnp.zeros((B, length), bool))


def empty_state() -> jax.Array:
    return jnp.zeros((B, K, R, H, V))


run = jax.jit(partial(delta_rule, compute=jnp.float32))


@jax.jit
def weighted_sum(inputs: DeltaInputs, state: jax.Array, weights: jax.Array):
    return jnp.sum(delta_rule(inputs, state, jnp.float32)[0] * weights)


def merge_heads(x):
    """Merge the two head dims: [B, T, K, R, ...] becomes [B, T, N, ...]."""
    return x.reshape(*x.shape[:2], K * R, *x.shape[4:])


def run_recurrence(q, k, v, g, beta):
    """Run the recurrence of the tests' reference, in the dtype of its arguments."""
    q, k = (jnp.repeat(x, R, axis=2) for x in (q, k))
    return recurrence(q, k, *map(merge_heads, (v, jnp.exp(g), beta)))


def error(actual, expected) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(
        np.abs(actual - expected.reshape(actual.shape)).max() / np.abs(expected).max()
    )


def run_in_float64(function, *arrays):
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        wide_arrays = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return jax.tree.map(np.asarray, jax.jit(function)(*wide_arrays))


@pytest.mark.parametrize("case", CASES)
def test_chunks_equal_the_recurrence(case):
    inputs = draw(case, 150)
    assert (
        error(
            run(inputs, empty_state())[0], run_in_float64(run_recurrence, *inputs[:5])
        )
        < 1e-5
    )


@pytest.mark.parametrize("case", ["usual", "similar", "steep"])
def test_gradients_equal_those_of_the_recurrence(case):
    inputs = draw(case, 100)
    weights = np.random.default_rng(2).normal(size=inputs.values.shape)
    weights = jnp.asarray(weights, jnp.float32)
    grads = jax.grad(weighted_sum, allow_int=True)(inputs, empty_state(), weights)

    def loss(weights, *arrays):
        return jnp.sum(run_recurrence(*arrays) * merge_heads(weights))

    expected = run_in_float64(jax.grad(loss, (1, 2, 3, 4, 5)), weights, *inputs[:5])
    for name, grad, expected_grad in zip(
        DeltaInputs._fields, grads, expected, strict=False
    ):
        assert error(grad, expected_grad) < 1e-5, name


@pytest.mark.parametrize("chunks_at_once", [1, 2, 3])
def test_groups_of_chunks_give_what_all_chunks_give(chunks_at_once):
    """150 positions are three chunks, which two at once do not divide."""
    inputs = draw("usual", 150)
    inputs = inputs._replace(starts=inputs.starts.at[:, 90].set(True))

    def loss(inputs: DeltaInputs, chunks_at_once: int | None):
        o, state = delta_rule(inputs, empty_state(), jnp.float32, chunks_at_once)
        return jnp.sum(o**2) + jnp.sum(state**2)

    gradient = jax.jit(
        jax.value_and_grad(loss, allow_int=True), static_argnames="chunks_at_once"
    )
    actual = gradient(inputs, chunks_at_once=chunks_at_once)
    expected = gradient(inputs, chunks_at_once=None)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        if a.dtype == jnp.float32:
            assert error(a, b) < 1e-6


def test_the_state_before_is_that_of_all_groups():
    inputs = draw("usual", 150)
    maps = []

    def state_before(local_map):
        maps.append(local_map)
        return empty_state()

    for chunks_at_once in (None, 1):
        delta_rule(inputs, state_before, jnp.float32, chunks_at_once)
    for a, b in zip(*maps, strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_single_positions_equal_chunks(case):
    inputs = draw(case, 70)
    inputs = inputs._replace(starts=inputs.starts.at[:, 66].set(True))
    outputs, last_state = run(inputs, empty_state())
    _, state = run(jax.tree.map(lambda x: x[:, :65], inputs), empty_state())
    for t in range(65, 70):
        step = jax.tree.map(lambda x, t=t: x[:, t : t + 1], inputs)
        o, state = run(step, state)
        assert error(o[:, 0], outputs[:, t]) < 1e-5
    assert error(state, last_state) < 1e-5


def test_packed_documents_give_the_results_they_give_alone():
    """Documents start at the first position of a chunk, inside it, and twice in one."""
    bounds = (0, 40, 64, 70, 150)
    inputs = draw("usual", bounds[-1])
    starts = inputs.starts.at[:, jnp.array(bounds[1:-1])].set(True)
    packed = inputs._replace(starts=starts)
    values_and_grads = jax.value_and_grad(weighted_sum, allow_int=True)
    outputs, last_state = run(packed, empty_state())
    for start, stop in pairwise(bounds):
        document = jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], inputs)
        o, state = run(document, empty_state())
        assert error(outputs[:, start:stop], o) < 1e-5
        weights = jnp.zeros_like(packed.values).at[:, start:stop].set(1.0)
        _, grads = values_and_grads(packed, empty_state(), weights)
        _, grads_alone = values_and_grads(
            document, empty_state(), jnp.ones_like(document.values)
        )
        for name, grad, grad_alone in zip(
            DeltaInputs._fields[:5], grads, grads_alone, strict=False
        ):
            assert error(grad[:, start:stop], grad_alone) < 1e-5, name
            outside = np.delete(grad, np.s_[start:stop], axis=1)
            assert not outside.any(), f"{name} of another document"
    assert error(last_state, state) < 1e-5


def test_bfloat16_operands_cost_little_accuracy():
    inputs = draw("similar", 150)
    actual, _ = delta_rule(inputs, empty_state(), jnp.bfloat16)
    expected = run_in_float64(run_recurrence, *inputs[:5]).reshape(actual.shape)
    assert np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)) < 1e-2


def test_transformers_computes_the_same():
    pytest.importorskip("transformers.models.qwen3_next")
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    for length in (1, 64, 150):
        inputs = draw("usual", length)
        actual = run(inputs, empty_state())
        q, k, *remaining = (torch.tensor(np.asarray(x)) for x in inputs[:5])
        arguments = q * H**0.5, k, *map(merge_heads, remaining)
        for rule in (
            qwen.torch_recurrent_gated_delta_rule,
            qwen.torch_chunk_gated_delta_rule,
        ):
            expected = rule(*arguments, output_final_state=True)
            for array, expected_array in zip(actual, expected, strict=True):
                assert error(array, expected_array.numpy()) < 1e-5
