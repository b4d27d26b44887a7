"""The gated delta layer agrees with transformers, and caches padded prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.catalog import MODEL_PARTS
from model.choices import Dtype
from model.config import ModelConfig
from model.execution import NO_CONTEXT, Execution
from model.gpt import abstract_gpt, bind
from model.params import Kind, layer_trees, param_infos
from model.parts.delta.layer import GatedDeltaNet
from tests.model.conftest import MODELS

pytestmark = pytest.mark.usefixtures("strict")


def test_left_padding_of_prompts_has_no_effect():
    """Prompts of 1, 3 and 5 tokens end in the same column, as in generation."""
    tiny = MODELS["hybrid"]
    lengths = (1, 3, 5)
    P = 5
    length = 9
    tokens = tiny.tokens(3, length)
    first_B = jnp.array([P - n for n in lengths])

    params = tiny.params

    @jax.jit
    def extend(cache, tokens, positions):
        model = bind(tiny.model, params)
        x, cache, _ = model.features(tokens, positions, None, tiny.execution, cache)
        return model.logits(x, tiny.execution), cache

    cache = abstract_gpt(tiny.config, MODEL_PARTS).empty_cache(
        3, length, tiny.execution, first_B
    )
    positions = jnp.maximum(jnp.arange(length)[None] - first_B[:, None], 0)
    _, cache = extend(cache, tokens[:, : P - 1], positions[:, : P - 1])
    rows = []
    for t in range(P - 1, length):
        logits, cache = extend(cache, tokens[:, t : t + 1], positions[:, t : t + 1])
        rows.append(logits)
    actual = np.concatenate(rows, 1)
    for row, first in enumerate(first_B.tolist()):
        prompt = tokens[row : row + 1, first:]
        expected = tiny.logits(
            tiny.params, prompt, jnp.arange(length - first)[None], None
        )
        np.testing.assert_allclose(actual[row], expected[0, P - 1 - first :], atol=2e-5)


def test_decays_stay_in_float32_and_have_no_weight_decay():
    config = ModelConfig(vocab_size=32, mixer="gated_delta", param_dtype=Dtype.bfloat16)
    model = abstract_gpt(config, MODEL_PARTS)
    for name in ("A_log", "dt_bias"):
        (block,) = layer_trees(model.layers)[0]
        (infos,) = layer_trees(param_infos(model)["layers"])[0]
        assert getattr(block.attention, name).dtype == jnp.float32
        assert infos["attention"][name].kind is Kind.vector


def test_a_backward_pass_saves_no_arrays_of_chunks():
    """An array of chunks has 64 numbers per position and head; a saved result has 8."""
    sizes = {"delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 8}
    net = GatedDeltaNet(ModelConfig(embed_dim=16, **sizes), nnx.Rngs(0))
    graph, params = nnx.split(net)
    x_BTD = jnp.ones((1, 512, 16))

    def num_saved(execution: Execution) -> int:
        def apply(params, x_BTD):
            net = nnx.merge(graph, params)
            return net(x_BTD, execution, NO_CONTEXT, None, False)[0]

        backward = jax.eval_shape(lambda *args: jax.vjp(apply, *args)[1], params, x_BTD)
        return sum(array.size for array in jax.tree.leaves(backward))

    assert num_saved(Execution()) < 12 * x_BTD.size
    # A layer that is recomputed as a whole saves them.
    assert num_saved(Execution(remat="full")) > 40 * x_BTD.size


def test_transformers_computes_the_same():
    """Transformers orders the weights of a key head as [q | k | v | z] and [b | a]."""
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_next")
    K = 2
    R = 2
    H = 8
    V = 6
    D = 16
    W = 4
    their_layer = qwen.modeling_qwen3_next.Qwen3NextGatedDeltaNet(
        qwen.Qwen3NextConfig(
            hidden_size=D,
            linear_num_key_heads=K,
            linear_num_value_heads=K * R,
            linear_key_head_dim=H,
            linear_value_head_dim=V,
            linear_conv_kernel_dim=W,
            rms_norm_eps=1e-5,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    )
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in their_layer.parameters():
            values = rng.normal(size=parameter.shape) * 0.5
            parameter.copy_(torch.tensor(values))
    weights = {name: p.detach().numpy() for name, p in their_layer.named_parameters()}
    config = ModelConfig(
        embed_dim=D,
        norm_unit_offset=True,  # This holds for all norms except that of the output.
        delta_key_heads=K,
        delta_value_heads=K * R,
        delta_key_dim=H,
        delta_value_dim=V,
    )
    our_layer = GatedDeltaNet(config, nnx.Rngs(0))
    qkvz = weights["in_proj_qkvz.weight"].T.reshape(D, K, -1)
    q, k, v, z = np.split(qkvz, np.cumsum([H, H, R * V]), axis=-1)
    b, a = np.split(weights["in_proj_ba.weight"].T.reshape(D, K, 2 * R), 2, axis=-1)
    taps = np.split(weights["conv1d.weight"][:, 0], [K * H, 2 * K * H])
    for parameter, values in (
        (our_layer.query.weight, q),
        (our_layer.key.weight, k),
        (our_layer.value.weight, v),
        (our_layer.gate.weight, z),
        (our_layer.beta.weight, b),
        (our_layer.dt.weight, a),
        (our_layer.query_taps, taps[0]),
        (our_layer.key_taps, taps[1]),
        (our_layer.value_taps, taps[2]),
        (our_layer.A_log, weights["A_log"]),
        (our_layer.dt_bias, weights["dt_bias"]),
        (our_layer.output_norm.scale, weights["norm.weight"]),
        (our_layer.output.weight, weights["out_proj.weight"].T),
    ):
        parameter[...] = jnp.asarray(values.reshape(parameter.shape))
    x = rng.normal(size=(2, 70, D)).astype(np.float32)
    actual, _ = our_layer(jnp.asarray(x), Execution(), NO_CONTEXT, None, False)
    expected = their_layer(torch.tensor(x)).detach().numpy()
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()
