"""The router chooses the experts that transformers' own routers choose."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.choices import Mlp, Scores
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.parts.experts.experts import Experts
from model.parts.experts.router import Router

pytestmark = pytest.mark.usefixtures("strict")

N = 1000
D = 32
E = 64
K = 6
GROUPS = {"router_groups": 8, "router_groups_kept": 3}
SIGMOID = {"router": Scores.sigmoid, "router_bias_rate": 0.1}
V3 = {**SIGMOID, **GROUPS, "routed_scaling": 2.5}
ROUTERS = {
    "V2 greedy": {"router_normalized": False, "routed_scaling": 1.5},
    "V2 group_limited_greedy": {
        "router_normalized": False,
        "router_group_best": 1,
        "routed_scaling": 16.0,
        **GROUPS,
    },
    "V3": V3,
    "Qwen3-Next": {},
}
rng = np.random.default_rng(0)
TOKENS = rng.normal(size=(N, D)).astype(np.float32)
TOKENS[:, 0] = 1
WEIGHT = rng.normal(size=(D, E)).astype(np.float32) * D**-0.5
BIAS = rng.normal(size=E).astype(np.float32) * 0.2


def make_router(weight=WEIGHT, bias=None, **choices):
    """Return a router of these weights."""
    dim, experts = weight.shape
    k = choices.pop("experts_per_token", K)
    config = ModelConfig(
        embed_dim=dim,
        mlp=Mlp.moe,
        num_experts=experts,
        experts_per_token=k,
        **choices,
    )
    router = Router(config, nnx.Rngs(0))
    router.weight[...] = jnp.asarray(weight)
    if bias is not None:
        assert router.balance is not None
        router.balance[...] = jnp.asarray(bias)
    return router


def choose(router, x, segment_ids=None):
    """Return experts and weights of tokens [B, T, D], and the balance statistics."""
    choice, routing = router(jnp.asarray(x), segment_ids, Execution())
    return (*jax.device_get(choice), routing)


def choose_in_transformers(name, weight, bias):
    """Return experts and weights of a router in transformers."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    kind = {"V": v2.DeepseekV2TopkRouter, "Q": qwen.Qwen3NextTopKRouter}[name[0]]
    kind = v3.DeepseekV3TopkRouter if name == "V3" else kind
    settings = SimpleNamespace(
        num_experts_per_tok=K,
        num_experts=E,
        num_local_experts=E,
        hidden_size=D,
        n_group=GROUPS["router_groups"],
        topk_group=GROUPS["router_groups_kept"],
        topk_method=name.removeprefix("V2 "),
        norm_topk_prob=True,
        routed_scaling_factor=ROUTERS[name].get("routed_scaling", 1.0),
    )
    router = kind(settings)
    router.weight.data = torch.tensor(weight.T)
    if name == "V3":
        router.e_score_correction_bias.data = torch.tensor(bias)
    with torch.no_grad():
        _, weights, experts = router(torch.tensor(TOKENS))
    return experts.numpy(), weights.numpy()


def weights_by_expert(experts, weights):
    """Return weights [N, E], which are 0 for experts that are not chosen."""
    dense = np.zeros((N, E), np.float32)
    np.put_along_axis(dense, experts.reshape(N, -1), weights.reshape(N, -1), axis=1)
    return dense


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("case", ["usual", "negative biases", "a group of zeros"])
def test_choices_are_those_of_transformers(name, case):
    """Biases near -2 make each ranked score negative."""
    weight = WEIGHT.copy()
    bias = BIAS.copy()
    if case == "negative biases":
        bias -= 2
    if case == "a group of zeros":
        weight[0, 8:16] = -1e4  # The first dim of each token is positive.
    expected_experts, expected_weights = choose_in_transformers(name, weight, bias)
    has_bias = ROUTERS[name].get("router") is Scores.sigmoid
    router = make_router(weight, bias if has_bias else None, **ROUTERS[name])
    experts, weights, _ = choose(router, TOKENS[None])
    np.testing.assert_array_equal(
        np.sort(experts[0], axis=1), np.sort(expected_experts, axis=1)
    )
    np.testing.assert_allclose(
        weights_by_expert(experts, weights),
        weights_by_expert(expected_experts, expected_weights),
        atol=1e-6 * ROUTERS[name].get("routed_scaling", 1.0),
    )


def test_a_tie_is_between_equal_experts():
    """Among equal scores any experts may be chosen, but with the same weights."""
    tied = np.repeat(WEIGHT[:, ::8], 8, axis=1)  # Each group has eight equal experts.
    expected_experts, expected_weights = choose_in_transformers(
        "V3", tied, np.zeros(E, np.float32)
    )
    experts, weights, _ = choose(make_router(tied, np.zeros(E), **V3), TOKENS[None])
    for row in range(N):
        assert len({*experts[0, row]}) == K
        assert {*experts[0, row] // 8} <= {*expected_experts[row] // 8}
    np.testing.assert_allclose(
        np.sort(weights[0], axis=1), np.sort(expected_weights, axis=1), atol=1e-6
    )


def test_experts_outside_the_best_groups_are_never_chosen():
    """A loop over groups finds a token's experts. All ranked scores are negative."""
    bias = BIAS - 2
    for best in (1, 2, 3):
        router = make_router(bias=bias, **(V3 | {"router_group_best": best}))
        experts, *_ = choose(router, TOKENS[None])
        ranked = 1 / (1 + np.exp(-TOKENS @ WEIGHT)) + bias
        for token in range(N):
            groups = np.sort(ranked[token].reshape(8, 8), axis=1)
            best_groups = np.argsort(groups[:, -best:].sum(axis=1))[-3:]
            candidates = [e for e in range(E) if e // 8 in best_groups]
            expected = sorted(candidates, key=lambda e: ranked[token, e])[-K:]
            assert {*experts[0, token]} == {*expected}


def test_scores_of_zero_give_weights_and_gradients_of_zero():
    sequence_loss = {"router_sequence_aux_weight": 1.0}
    router = make_router(np.full((D, E), -30.0), np.zeros(E), **V3, **sequence_loss)

    def total(x):
        choice, routing = router(x, None, Execution())
        return jnp.sum(choice.weights) + routing.loss

    x = jnp.ones((1, 4, D))
    value, grad = jax.value_and_grad(total)(x)
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("scores", Scores)
def test_each_row_has_its_own_balance_loss(scores):
    """A loop over rows, experts and tokens computes the same loss without padding."""
    B = 3
    T = 10
    E = 8
    k = 2
    rate = 0.3
    weight = WEIGHT[:, :E]
    lengths = [10, 7, 0]
    x = TOKENS[: B * T].reshape(B, T, D)
    segment_ids = np.array([[t < length for t in range(T)] for length in lengths])
    router = make_router(
        weight, experts_per_token=k, router=scores, router_sequence_aux_weight=rate
    )
    experts, _, routing = choose(router, x, jnp.asarray(segment_ids, jnp.int32))
    expected = 0.0
    for row, length in enumerate(lengths):
        logits = (x[row] @ weight).astype(np.float64)
        s = 1 / (1 + np.exp(-logits)) if scores == "sigmoid" else np.exp(logits)
        loss = 0.0
        for expert in range(E):
            chosen = sum(expert in experts[row, t] for t in range(length))
            f = E / (k * max(1, length)) * chosen
            shares = [s[t, expert] / s[t].sum() for t in range(length)]
            loss += f * sum(shares) / max(1, length)
        expected += rate * length * loss
    assert expected > 1
    assert float(routing.loss) == pytest.approx(expected, rel=1e-5)


def test_a_gate_multiplies_the_shared_experts():
    sizes = {"embed_dim": 16, "num_experts": 4, "expert_dim": 12, "shared_experts": 1}
    config = ModelConfig(mlp=Mlp.moe, shared_expert_gate=True, **sizes)
    experts = Experts(config, nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(2, 5, 16)), jnp.float32)

    def outputs():
        return experts(x, None, Execution(), CallContext())[0]

    def with_gate(weight):
        experts.shared_gate[...] = jnp.asarray(weight, jnp.float32)
        return outputs()

    gate = rng.normal(size=16)
    half_output = with_gate(np.zeros(16))
    output = with_gate(gate)
    shared = experts.shared(x, Execution(), CallContext())
    factor = 1 / (1 + np.exp(-np.asarray(x) @ gate))[..., None] - 0.5
    np.testing.assert_allclose(output - half_output, factor * shared, atol=1e-5)
    assert np.abs(factor * shared).max() > 0.1
