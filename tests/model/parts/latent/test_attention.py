"""Latent attention agrees with transformers, and gives the same with a cache."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.choices import RopeScaling, Scaling
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.parts.latent.attention import LatentAttention
from model.parts.latent.cache import Latents
from model.rope import make_rotations

CONFIG = ModelConfig(
    num_heads=3,
    embed_dim=24,
    vocab_size=32,
    mixer="latent_attention",
    query_rank=20,
    kv_rank=16,
    nope_head_dim=10,
    rope_head_dim=6,
    value_head_dim=7,
    norm_epsilon=1e-2,
)
T = 12


def yarn(**options: float) -> RopeScaling:
    return RopeScaling(
        Scaling.yarn, factor=8.0, original_length=4, fast_turns=2.0, **options
    )


def make_layer(config: ModelConfig):
    """Return a layer with every parameter moved from its initial value."""
    layer = LatentAttention(config, nnx.Rngs(0))
    graph, params = nnx.split(layer)
    rng = np.random.default_rng(1)
    moved_params = jax.tree.map(
        lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), params
    )
    return graph, moved_params


def rows(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def apply_layer(graph, config, params, x, positions=None, cache=None):
    """Return the layer's output and the cache."""
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    call = CallContext(rotations=make_rotations(positions, config))
    return nnx.merge(graph, params)(x, Execution(), call, cache, False)


def order(dim: int) -> list[int]:
    """Return the index of each rotated dim in transformers, which pairs neighbours."""
    return [*range(0, dim, 2), *range(1, dim, 2)]


def their_weights(params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Lay out weights as transformers does: [outputs, inputs], with adjacent pairs."""
    R = config.rope_head_dim
    inverse = np.argsort(order(R))

    def interleave(weight):
        weight = np.asarray(weight)
        return np.concatenate([weight[..., :-R], weight[..., -R:][..., inverse]], -1)

    def flatten(weight, inputs: int = 1):
        weight = np.asarray(weight)
        return weight.reshape(np.prod(weight.shape[:inputs]), -1).T

    weights = {
        "kv_a_proj_with_mqa": flatten(interleave(params["key_value_down"]["weight"])),
        "kv_a_layernorm": np.asarray(params["key_value_norm"]["scale"]),
        "kv_b_proj": flatten(params["key_value_up"]["weight"]),
        "o_proj": flatten(params["output"]["weight"], 2),
    }
    if config.query_rank is None:
        return weights | {"q_proj": flatten(interleave(params["query"]["weight"]))}
    return weights | {
        "q_a_proj": flatten(params["query_down"]["weight"]),
        "q_a_layernorm": np.asarray(params["query_norm"]["scale"]),
        "q_b_proj": flatten(interleave(params["query_up"]["weight"])),
    }


@pytest.mark.parametrize(
    ("version", "query_rank", "scaling"),
    [
        ("V2", None, RopeScaling()),
        ("V3", 20, RopeScaling()),
        ("V2", 20, yarn(mscale=0.707, mscale_all_dim=0.707)),
        ("V3", None, yarn(mscale=1.0, mscale_all_dim=1.0)),
        ("V2", None, yarn(mscale=1.0, mscale_all_dim=0.5)),
        ("V3", 20, yarn()),
        ("V3", 20, yarn(mscale=1.0, mscale_all_dim=1.0, attention_factor=1.3)),
    ],
)
def test_outputs_and_gradients_equal_those_of_transformers(
    version, query_rank, scaling
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    module = getattr(transformers.models, f"deepseek_{version.lower()}")
    module = getattr(module, f"modeling_deepseek_{version.lower()}")
    config = dataclasses.replace(
        CONFIG, query_rank=query_rank, rope_scaling=scaling, rope_theta=100.0
    )
    rope = {"rope_type": "default", "rope_theta": 100.0}
    if scaling.kind is Scaling.yarn:
        rope |= {"rope_type": "yarn", "factor": 8.0, "beta_fast": 2.0, "beta_slow": 1.0}
        rope |= {"original_max_position_embeddings": 4}
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            rope |= {name: value} if (value := getattr(scaling, name)) else {}
    settings = getattr(transformers, f"Deepseek{version}Config")(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=query_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=7,
        max_position_embeddings=32,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    their_layer = getattr(module, f"Deepseek{version}Attention")(settings, 0)
    rotary = getattr(module, f"Deepseek{version}RotaryEmbedding")(settings)
    graph, params = make_layer(config)
    weights = their_weights(nnx.to_pure_dict(params), config)
    parameters = {
        k.removesuffix(".weight"): v for k, v in their_layer.named_parameters()
    }
    assert parameters.keys() == weights.keys()
    for name, weight in weights.items():
        parameters[name].data = torch.tensor(weight)
    x = rows(2, T, 24)
    cotangent = np.sin(np.arange(2 * T * 24)).reshape(2, T, 24)
    their_x = torch.tensor(np.asarray(x), requires_grad=True)
    future_mask = torch.triu(torch.full((T, T), -torch.inf), 1)[None, None]
    rotations = rotary(their_x, torch.arange(T)[None])
    expected = their_layer(
        their_x, position_embeddings=rotations, attention_mask=future_mask
    )[0]
    (expected * torch.tensor(cotangent)).sum().backward()

    def loss(params, x):
        y, _ = apply_layer(graph, config, params, x)
        return jnp.sum(y * cotangent), y

    (dparams, dx), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
    assert_close(y, expected.detach())
    assert_close(dx, their_x.grad)
    grads = their_weights(nnx.to_pure_dict(dparams), config)
    for name, grad in grads.items():
        assert_close(grad, parameters[name].grad)


def assert_close(actual, expected, limit=1e-5):
    """Check the error relative to the largest expected value."""
    expected = np.asarray(expected)
    assert np.abs(actual - expected).max() < limit * np.abs(expected).max()


def test_attention_to_cached_latents_is_attention_to_the_row():
    scaling = yarn(mscale=1.0, mscale_all_dim=1.0)
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    graph, params = make_layer(config)
    x = rows(2, T, 24)
    attend = jax.jit(partial(apply_layer, graph, config))
    expected, _ = attend(params, x)
    # Positions that are not yet written hold huge values.
    cache = Latents(jnp.full((2, 15, 22), 1e30), jnp.int32(0))
    for start, end in itertools.pairwise((0, 7, 8, T)):
        positions = jnp.broadcast_to(jnp.arange(start, end), (2, end - start))
        part = x[:, start:end]
        y, cache = attend(params, part, positions, cache)
        assert_close(y, expected[:, start:end])
    assert cache.length == T
