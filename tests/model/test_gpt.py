"""The whole model agrees with its definition and with a reference in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from model.catalog import MODEL_PARTS
from model.count import num_params
from model.execution import Execution, Numerics
from model.gpt import GPT, abstract_gpt, bind, params_of
from model.params import named
from tests.model.reference import reference_loss

pytestmark = pytest.mark.usefixtures("strict")

# ---- Values and gradients


def test_loss_and_gradients_are_those_of_a_reference_in_float64(tiny):
    tokens = tiny.tokens(2, 9)
    result = tiny.value_and_grad(tiny.params, tokens)
    loss, grads = jax.tree.map(np.asarray, result)
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),  # The reference relies on it.
        jax.numpy_dtype_promotion("standard"),
    ):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), tiny.params)
        step = jax.value_and_grad(lambda p: reference_loss(p, tiny.config, tokens))
        fast = {"xla_backend_optimization_level": 0}  # It is fast to compile.
        expected = jax.jit(step, compiler_options=fast)(params)
        expected_loss, expected_grads = jax.tree.map(np.asarray, expected)
        assert expected_loss.dtype == np.float64
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    expected = dict(named(expected_grads))
    # If layers of both kinds are nested in groups, the order of sums moves the first
    # layer's key by 6.1e-5 (without LLVM's optimizations) or 3.8e-5 (with), on a Xeon.
    tolerance = 1e-4 if tiny.config.experts_every > 2 else 4e-5
    for name, grad in named(grads):
        scale = np.abs(expected[name]).max()
        if name.endswith("key.bias") and tiny.config.position == "learned":
            # This bias adds the same to all scores of a query.
            assert scale < 1e-12
            scale = 1.0
        if name.endswith("balance"):  # It only chooses experts.
            assert not grad.any()
            continue
        assert scale > 1e-6, f"{name} does not matter"
        error = np.abs(grad - expected[name]).max() / scale
        assert error < tolerance, f"{name}: {error}"


def dots(jaxpr) -> list:
    """Return the operand dtypes of every product in a jaxpr and its inner jaxprs."""
    pairs = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            pairs.append(tuple(str(v.aval.dtype) for v in equation.invars))
        for sub in jaxprs_in_params(equation.params):
            pairs += dots(sub)
    return pairs


def test_every_product_of_a_step_has_bfloat16_operands(tiny):
    numerics = Numerics(compute_dtype=jnp.dtype(jnp.bfloat16))
    execution = Execution(numerics=numerics)
    step = jax.grad(lambda p: tiny.loss(p, tiny.tokens(1, 9), execution))
    pairs = dots(jax.make_jaxpr(step)(tiny.params).jaxpr)
    assert len(pairs) > 20
    if tiny.config.mlp == "moe":  # The router is exact.
        routers = [pair for pair in pairs if pair == ("float32", "float32")]
        assert len(routers) == 3
        pairs = [pair for pair in pairs if pair not in routers]
    if "gated_delta" in tiny.config.mixers:  # Products with its inverse are exact.
        pairs = [pair for pair in pairs if pair != ("float32", "float32")]
        assert len(pairs) > 20
    assert set(pairs) == {("bfloat16", "bfloat16")}


# ---- Visible positions


def test_a_position_sees_its_own_document_only(tiny):
    """The logits at t depend on the embedding at s only inside a document.

    `gradients` [t, s] are norms. Each position holds another token, so the gradient of
    the token's row of the table is that of the position's input. The head, which may
    share the table, is constant.
    """
    tokens = jnp.arange(8)[None]
    documents = np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0]])
    pick = jax.random.normal(jax.random.key(2), (tiny.config.vocab_size,))

    def logits(table):
        params = {**tiny.params, "embedding": {"weight": table}}
        model = bind(tiny.model, params)
        x, *_ = model.features(
            tokens, positions, jnp.asarray(documents), tiny.execution
        )
        return bind(tiny.model, tiny.params).logits(x, tiny.execution)[0] @ pick

    jacobian = jax.jit(jax.jacrev(logits))(tiny.params["embedding"]["weight"])
    gradients = np.linalg.norm(jacobian[:, :8], axis=-1)
    visible = np.tri(8, dtype=bool) & (documents[0][:, None] == documents[0])
    assert (gradients[~visible] == 0).all()
    assert (gradients[visible] > 1e-5).all()


def test_packed_documents_give_the_logits_they_give_alone(tiny):
    lengths = (5, 2, 5)
    row = tiny.tokens(1, sum(lengths))
    documents = np.repeat([1, 2, 3], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    packed = tiny.logits(tiny.params, row, positions, documents)
    for number, length in enumerate(lengths, start=1):
        columns = documents[0] == number
        expected = tiny.logits(
            tiny.params, row[:, columns], np.arange(length)[None], None
        )
        np.testing.assert_allclose(packed[:, columns], expected, atol=5e-6, rtol=1e-5)
    unmasked = tiny.logits(tiny.params, row, positions, None)
    assert np.abs(packed - unmasked)[:, lengths[0] :].max() > 1e-3


# ---- Generation


def test_token_by_token_gives_the_logits_of_the_whole_row(tiny):
    rows = 2
    length = 9
    prompt = 4
    tokens = tiny.tokens(rows, length)
    positions = np.broadcast_to(np.arange(length), (rows, length))
    expected = tiny.logits(tiny.params, tokens, positions, None)

    @jax.jit
    def extend(cache, tokens, positions):
        model = bind(tiny.model, tiny.params)
        x, cache, _ = model.features(tokens, positions, None, tiny.execution, cache)
        return model.logits(x, tiny.execution), cache

    cache = abstract_gpt(tiny.config, MODEL_PARTS).empty_cache(
        rows, length + 3, tiny.execution
    )
    logits, cache = extend(cache, tokens[:, :prompt], positions[:, :prompt])
    pieces = [logits]
    for t in range(prompt, length):
        logits, cache = extend(cache, tokens[:, t : t + 1], positions[:, t : t + 1])
        pieces.append(logits)
    lengths = [n for stack in cache for n in stack.length.tolist()]
    assert lengths == [length] * tiny.config.num_layers
    np.testing.assert_allclose(
        np.concatenate(pieces, 1), expected, atol=5e-6, rtol=1e-5
    )


# ---- Depth, recomputation, the head


def test_a_deep_model_lowers_to_no_more_code_than_a_shallow_one(llama):
    def lines(num_layers: int) -> int:
        model = abstract_gpt(replace(llama.config, num_layers=num_layers), MODEL_PARTS)

        def loss(params, tokens):
            positions = jnp.arange(tokens.shape[1])[None]
            x, *_ = bind(model, params).features(
                tokens, positions, None, llama.execution
            )
            return x.sum()

        lowered = jax.jit(jax.grad(loss)).lower(params_of(model), llama.tokens(1, 8))
        return lowered.as_text().count("\n")

    assert lines(48) <= 1.05 * lines(6)


@pytest.mark.parametrize(("unroll", "barriers"), [(1, False), (2, False), (-1, True)])
def test_xla_does_not_undo_recomputation(llama, unroll, barriers):
    """XLA merges equal computations unless a loop or a barrier separates them."""
    model = abstract_gpt(replace(llama.config, num_layers=4), MODEL_PARTS)
    positions = jnp.arange(8)[None]
    execution = llama.execution._replace(remat="full", layer_unroll=unroll)

    def loss(params):
        x, *_ = bind(model, params).features(positions, positions, None, execution)
        return x.sum()

    text = jax.jit(jax.grad(loss)).lower(params_of(model)).as_text()
    assert ("optimization_barrier" in text) == barriers


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_vocabulary_is_padded_without_visible_effect(llama, tied):
    config = replace(llama.config, vocab_size=1030, tied_head=tied)
    params = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0), MODEL_PARTS)))()
    table = params["embedding"]["weight"]
    model = abstract_gpt(config, MODEL_PARTS)
    assert table.shape == (1152, config.embed_dim)
    assert table[:1030].all()
    assert not table[1030:].any()
    model = bind(model, params)
    assert model.head_weight.shape[0 if tied else 1] == 1152
    x = jnp.ones((1, 4, config.embed_dim))
    assert model.logits(x, llama.execution).shape == (1, 4, 1030)
    unpadded_size = num_params(
        abstract_gpt(replace(config, vocab_size=1000), MODEL_PARTS)
    )
    tables = 1 if tied else 2
    assert num_params(model) - unpadded_size == tables * 30 * config.embed_dim
