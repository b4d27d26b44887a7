"""A policy saves results by name and recomputes others. No gradient changes."""

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


def loss_under_policy(tiny, policy):
    """Return the loss function of a model that recomputes by this policy."""
    execution = tiny.execution._replace(remat=policy)
    return lambda params, tokens: tiny.loss(params, tokens, execution)


def count(jaxpr, primitive: str) -> int:
    """Count the equations of a kind in a jaxpr and those inside it.

    Equations without results do not count, as XLA leaves them out.
    """
    total = 0
    for equation in (equation for equation in jaxpr.eqns if equation.outvars):
        total += equation.primitive.name == primitive
        if equation.primitive.name != primitive:
            total += sum(
                count(sub, primitive) for sub in jaxprs_in_params(equation.params)
            )
    return total


def count_products(tiny, policy) -> int:
    step = jax.grad(loss_under_policy(tiny, policy))
    return count(
        jax.make_jaxpr(step)(tiny.params, tiny.tokens(1, 9)).jaxpr, "dot_general"
    )


def saved_bytes(tiny, policy) -> int:
    loss = loss_under_policy(tiny, policy)
    tokens = tiny.tokens(2, 17)
    pull_back = jax.eval_shape(lambda p: jax.vjp(loss, p, tokens)[1], tiny.params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull_back))


def test_each_policy_saves_less_than_the_next(tiny):
    names = ("attention", "query", "key", "value")
    policies = ["full", ("attention",), names, INTERMEDIATES, "none"]
    sizes = [saved_bytes(tiny, policy) for policy in policies]
    assert sizes == sorted(set(sizes))
    assert sizes[0] < saved_bytes(tiny, "dots") < sizes[-1]
    assert saved_bytes(tiny, ()) == sizes[0]


@pytest.mark.parametrize("name", [n for n in INTERMEDIATES if n != "latent"])
def test_a_saved_result_is_not_recomputed(llama, name):
    """Each name saves one product; attention saves that of weights and values."""
    assert count_products(llama, (name,)) == count_products(llama, "full") - 1


def test_latents_are_saved_instead_of_keys_and_values():
    """Latents save two products that compress, and keys and values one that expands."""
    tiny = MODELS["latent"]
    full = count_products(MODELS["latent"], "full")
    assert count_products(tiny, ("latent",)) == full - 2
    assert count_products(tiny, ("key", "value")) == full - 1
    assert saved_bytes(tiny, ("latent",)) < saved_bytes(tiny, ("key", "value"))


@pytest.mark.parametrize(
    "policy", ["dots", "full", ("attention", "query", "mlp_up"), INTERMEDIATES]
)
def test_recomputing_changes_no_gradient(llama, policy):
    tokens = llama.tokens(2, 9)
    expected = llama.value_and_grad(llama.params, tokens)
    value_and_grad = jax.jit(jax.value_and_grad(loss_under_policy(llama, policy)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5),
        value_and_grad(llama.params, tokens),
        expected,
    )


@pytest.mark.parametrize(("policy", "kernels"), [("full", 4), (("attention",), 3)])
def test_splash_runs_forward_once_where_its_results_are_kept(policy, kernels):
    """A step runs one forward and two backward kernels, and may run forward again."""

    def loss(x):
        def layer(x):
            method = KernelAttention(Attention.splash)
            out = method.attend(Inputs(x, x, x), AttentionOptions(jnp.float32))
            return jnp.sin(out.o_BTNV)

        return rematerialized(layer, policy, (), in_loop=True)(x).sum()

    x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.float32)
    assert count(jax.make_jaxpr(jax.grad(loss))(x).jaxpr, "pallas_call") == kernels
