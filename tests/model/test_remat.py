"""What is kept by name, what is computed again, and that it changes no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from model.attention.inputs import Inputs
from model.attention.method import AttentionOptions
from model.choices import INTERMEDIATES, Attention
from model.parts.attention import KernelAttention
from model.remat import rematerialized
from tests.model.conftest import MODELS

pytestmark = pytest.mark.usefixtures("strict")


def recomputing(tiny, policy):
    """The loss of a model that recomputes by this policy."""
    execution = tiny.execution._replace(remat=policy)
    return lambda params, tokens: tiny.loss(params, tokens, execution)


def count(jaxpr, primitive: str) -> int:
    """Count the equations of a kind in a jaxpr and those inside it.

    XLA leaves out what has no results.
    """
    total = 0
    for equation in (equation for equation in jaxpr.eqns if equation.outvars):
        total += equation.primitive.name == primitive
        if equation.primitive.name != primitive:
            total += sum(
                count(sub, primitive) for sub in jaxprs_in_params(equation.params)
            )
    return total


def products(tiny, policy) -> int:
    step = jax.grad(recomputing(tiny, policy))
    return count(
        jax.make_jaxpr(step)(tiny.params, tiny.tokens(1, 9)).jaxpr, "dot_general"
    )


def kept_bytes(tiny, policy) -> int:
    loss = recomputing(tiny, policy)
    tokens = tiny.tokens(2, 17)
    back = jax.eval_shape(lambda p: jax.vjp(loss, p, tokens)[1], tiny.params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(back))


def test_each_policy_keeps_less_than_the_next(tiny):
    some = ("attention", "query", "key", "value")
    policies = ["full", ("attention",), some, INTERMEDIATES, "none"]
    sizes = [kept_bytes(tiny, policy) for policy in policies]
    assert sizes == sorted(set(sizes))
    assert sizes[0] < kept_bytes(tiny, "dots") < sizes[-1]
    assert kept_bytes(tiny, ()) == sizes[0]


@pytest.mark.parametrize("name", [n for n in INTERMEDIATES if n != "latent"])
def test_what_is_kept_is_not_computed_again(llama, name):
    """One product of a layer each; of attention that of weights and values."""
    assert products(llama, (name,)) == products(llama, "full") - 1


def test_latents_are_kept_instead_of_keys_and_values():
    """The two products that compress, and the one that expands keys and values."""
    tiny = MODELS["latent"]
    full = products(MODELS["latent"], "full")
    assert products(tiny, ("latent",)) == full - 2
    assert products(tiny, ("key", "value")) == full - 1
    assert kept_bytes(tiny, ("latent",)) < kept_bytes(tiny, ("key", "value"))


@pytest.mark.parametrize(
    "policy", ["dots", "full", ("attention", "query", "mlp_up"), INTERMEDIATES]
)
def test_recomputing_changes_no_gradient(llama, policy):
    tokens = llama.tokens(2, 9)
    expected = llama.value_and_grad(llama.params, tokens)
    found = jax.jit(jax.value_and_grad(recomputing(llama, policy)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5),
        found(llama.params, tokens),
        expected,
    )


@pytest.mark.parametrize(("policy", "kernels"), [("full", 4), (("attention",), 3)])
def test_splash_runs_forward_once_where_its_results_are_kept(policy, kernels):
    """Forward, twice backward; and forward again."""

    def loss(x):
        def layer(x):
            method = KernelAttention(Attention.splash)
            out = method.attend(Inputs(x, x, x), AttentionOptions(jnp.float32))
            return jnp.sin(out.o_BTNV)

        return rematerialized(layer, policy, (), in_loop=True)(x).sum()

    x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.float32)
    assert count(jax.make_jaxpr(jax.grad(loss))(x).jaxpr, "pallas_call") == kernels
