"""The whole model against its definition, and against a reference in float64."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from model.choices import Init
from model.config import ModelConfig
from model.execution import Execution
from model.gpt import (
    GPT,
    abstract_gpt,
    bind,
    num_active_params,
    num_params,
    params_of,
)
from model.params import named

pytestmark = pytest.mark.usefixtures("strict")

# ---- Presets


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_1558m", 1_557_611_200),
        ("llama3_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("gpt_oss_20b", 20_914_757_184),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(composed, preset, count):
    assert num_params(composed(f"model={preset}").model) == count


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("llama3_1b", 1_235_814_400),
        ("mixtral_8x7b", 12_879_925_248),
        ("qwen3_30b_a3b", 3_353_032_704),
        ("gpt_oss_20b", 4_187_440_704),  # 3.61 B and what looks tokens up
    ],
)
def test_a_token_meets_as_many_as_were_published(composed, preset, count):
    assert num_active_params(composed(f"model={preset}").model) == count


def test_with_experts_a_token_meets_what_the_default_has(composed):
    """But for routers."""
    config = composed("model=moe_nano").model
    routers = 3 * (config.embed_dim + 1) * config.num_experts  # and their biases
    assert num_active_params(config) - num_params(composed().model) == routers


def test_the_default_is_as_small_as_its_file_says(composed):
    assert num_params(composed().model) == pytest.approx(0.9e6, rel=0.05)


# ---- Values and gradients


def reference_loss(params, config: ModelConfig, tokens):
    """Tiny.loss in the dtype of `params`, layer by layer, all of it written out."""
    p, T = params, tokens.shape[1] - 1
    H, R = config.head_size, config.rotary_dim

    def norm(x, scale, bias=None, centre=config.norm == "layernorm"):
        over = tuple(range(-scale.ndim, 0))
        x = x - x.mean(over, keepdims=True) if centre else x
        x = x / jnp.sqrt((x**2).mean(over, keepdims=True) + config.norm_epsilon)
        x = x * (1 + scale if config.norm_unit_offset else scale)
        return x if bias is None else x + bias

    def linear(x, layer, inputs=1):
        y = jnp.tensordot(x, layer["weight"], inputs)
        return y + layer["bias"] if "bias" in layer else y

    def turned(x, theta):  # each pair of dims (i, i + R/2) as one complex number
        exponents = np.arange(R // 2) / (R // 2)
        angles = np.arange(T)[:, None] * theta**-exponents
        z = x[..., : R // 2] + 1j * x[..., R // 2 : R]
        z = z * np.exp(1j * angles)[None, :, None]
        return jnp.concatenate([z.real, z.imag, x[..., R:]], -1)

    def gelu(x):
        return x / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def bent(x, mlp):
        if config.activation == "swiglu":
            gate = linear(x, mlp["gate"])
            return gate / (1 + jnp.exp(-gate)) * linear(x, mlp["up"])
        if config.activation == "clamped_swiglu":
            gate, up = (linear(x, mlp[name]) for name in ("gate", "up"))
            limit = config.swiglu_limit
            gate = jnp.where(gate > limit, limit, gate)
            up = jnp.where(jnp.abs(up) > limit, limit * jnp.sign(up), up)
            return gate / (1 + jnp.exp(-config.swiglu_alpha * gate)) * (up + 1)
        if config.activation == "geglu":
            return gelu(linear(x, mlp["gate"])) * linear(x, mlp["up"])
        x = linear(x, mlp["up"])
        if config.activation == "relu2":
            return jnp.maximum(x, 0) ** 2
        return gelu(x)

    def routed(x, mlp):
        scores = 1 / (1 + jnp.exp(-linear(x, mlp["router"])))
        ranked = scores + mlp["router"]["balance"]
        least = jnp.sort(ranked)[..., -config.experts_per_token]
        weights = jnp.where(ranked >= least[..., None], scores, 0)
        weights = weights / weights.sum(-1, keepdims=True)
        for e in range(config.num_experts):
            own = {k: {"weight": mlp[k][e]} for k in ("gate", "up", "down")}
            for k in own if config.bias else ():
                own[k]["bias"] = mlp[f"{k}_bias"][e]
            yield weights[..., e : e + 1] * linear(bent(x, own), own["down"])
        yield linear(bent(x, mlp["shared"]), mlp["shared"]["down"])

    x = p["embedding"]["weight"][tokens[:, :-1]]
    x = x * math.sqrt(config.embed_dim) if config.scaled_embedding else x
    if config.position == "learned":
        x = x + p["positions"]["weight"][:T]
    for index in range(config.num_layers):
        at, stack = index - config.dense_layers, "layers"
        if at < 0:
            at, stack = index, "dense_layers"
        elif config.expert_layers:
            at, place = divmod(at, config.experts_every)
            if place < config.experts_every - 1:
                at, stack = at * (config.experts_every - 1) + place, "layers_between"
        layer = jax.tree.map(lambda a, at=at: a[at], p[stack])
        part, h = layer["attention"], norm(x, **layer["attention_norm"])
        q, k, v = (linear(h, part[name]) for name in ("query", "key", "value"))
        if config.qk_norm:
            q = norm(q, part["query_norm"]["scale"], centre=False)
            k = norm(k, part["key_norm"]["scale"], centre=False)
        if config.position == "rotary":
            local = config.windows[index] is not None and config.rope_theta_local
            q, k = (turned(y, local or config.rope_theta) for y in (q, k))
        k, v = (jnp.repeat(y, config.num_heads // config.kv_heads, 2) for y in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        scores = scores / math.sqrt(config.query_scale_dim or H)
        if config.attention_soft_cap is not None:
            cap = config.attention_soft_cap
            scores = cap * jnp.tanh(scores / cap)
        behind = np.arange(T)[:, None] - np.arange(T)
        seen = (behind >= 0) & (behind < (config.windows[index] or T))
        weights = jnp.where(seen, jnp.exp(scores), 0)
        nothing = jnp.exp(part["sinks"])[:, None, None] if "sinks" in part else 0
        weights = weights / (nothing + weights.sum(-1, keepdims=True))
        heads = jnp.einsum("bnts,bsnh->btnh", weights, v)
        after = config.norm_placement == "both"
        h = linear(heads, part["output"], 2)
        x = x + (norm(h, **layer["attention_output_norm"]) if after else h)
        h, mlp = norm(x, **layer["mlp_norm"]), layer["mlp"]
        if "router" in mlp:
            x = x + sum(routed(h, mlp))
        else:
            h = linear(bent(h, mlp), mlp["down"])
            x = x + (norm(h, **layer["mlp_output_norm"]) if after else h)
    x = norm(x, **p["norm"])
    head = p["embedding"]["weight"].T if config.tied_head else p["head"]["weight"]
    return reference_nats(x @ head, config.logit_soft_cap, tokens[:, 1:])


def reference_nats(logits, cap, targets):
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    logp = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    return -jnp.take_along_axis(logp, targets[..., None], -1).mean()


def test_loss_and_gradients_are_those_of_a_reference_in_float64(tiny):
    tokens = tiny.tokens(2, 9)
    found = tiny.value_and_grad(tiny.params, tokens)
    loss, grads = jax.tree.map(np.asarray, found)
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),  # the reference's own
        jax.numpy_dtype_promotion("standard"),
    ):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), tiny.params)
        step = jax.value_and_grad(lambda p: reference_loss(p, tiny.config, tokens))
        quick = {"xla_backend_optimization_level": 0}  # to compile, not to run
        expected = jax.jit(step, compiler_options=quick)(params)
        expected_loss, expected_grads = jax.tree.map(np.asarray, expected)
        assert expected_loss.dtype == np.float64
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    expected = dict(named(expected_grads))
    # Where layers of both kinds are nested in groups the order of sums moves the first
    # layer's key by 6.1e-5 (LLVM's optimizations off) or 3.8e-5 (on), on a Xeon.
    allowed = 1e-4 if tiny.config.experts_every > 2 else 4e-5
    for name, grad in named(grads):
        scale = np.abs(expected[name]).max()
        if name.endswith("key.bias") and tiny.config.position == "learned":
            # It adds the same to all scores of a query.
            assert scale < 1e-12
            scale = 1.0
        if name.endswith("balance"):  # it only chooses
            assert not grad.any()
            continue
        assert scale > 1e-6, f"{name} does not matter"
        error = np.abs(grad - expected[name]).max() / scale
        assert error < allowed, f"{name}: {error}"


def dots(jaxpr) -> list:
    """Every product of a jaxpr and of those inside it, as its operands' dtypes."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(tuple(str(v.aval.dtype) for v in equation.invars))
        for sub in jaxprs_in_params(equation.params):
            found += dots(sub)
    return found


def test_every_product_of_a_step_has_bfloat16_operands(tiny):
    how = Execution(compute_dtype=jnp.dtype(jnp.bfloat16))
    step = jax.grad(lambda p: tiny.loss(p, tiny.tokens(1, 9), how))
    found = dots(jax.make_jaxpr(step)(tiny.params).jaxpr)
    assert len(found) > 20
    if tiny.config.mlp == "moe":  # its router is exact
        routers = [pair for pair in found if pair == ("float32", "float32")]
        assert len(routers) == 3
        found = [pair for pair in found if pair not in routers]
    assert set(found) == {("bfloat16", "bfloat16")}


# ---- What a position may see


def test_a_position_sees_itself_and_what_came_before(tiny):
    """Of eight rows each has another token at one position, the last one none."""
    rows = np.tile(np.arange(8), (9, 1))
    np.fill_diagonal(rows, 20)
    positions = np.broadcast_to(np.arange(8), (9, 8))
    logits = np.asarray(tiny.logits(tiny.params, rows, positions, None))
    moved = np.abs(logits[:8] - logits[8]).max(-1).T
    seen = np.tri(8, dtype=bool)
    assert (moved[~seen] < 1e-6).all()
    assert (moved[seen] > 1e-4).all()


def test_a_position_sees_its_own_document_only(tiny):
    """How the logits at t move with the embedding at s: the norm, [t, s].

    Each position holds another token, so the gradient in the token's row of the table
    is the one in the position's input. The head, which may share the table, stays.
    """
    tokens, documents = jnp.arange(8)[None], np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0]])
    pick = jax.random.normal(jax.random.key(2), (tiny.config.vocab_size,))

    def logits(table):
        params = {**tiny.params, "embedding": {"weight": table}}
        of = bind(tiny.model, params)
        x, *_ = of.features(tokens, positions, jnp.asarray(documents), tiny.how)
        return bind(tiny.model, tiny.params).logits(x, tiny.how)[0] @ pick

    jacobian = jax.jit(jax.jacrev(logits))(tiny.params["embedding"]["weight"])
    gradients = np.linalg.norm(jacobian[:, :8], axis=-1)
    seen = np.tri(8, dtype=bool) & (documents[0][:, None] == documents[0])
    assert (gradients[~seen] == 0).all()
    assert (gradients[seen] > 1e-5).all()


def test_packed_documents_give_the_logits_they_give_alone(tiny):
    lengths = (5, 2, 5)
    row = tiny.tokens(1, sum(lengths))
    documents = np.repeat([1, 2, 3], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    packed = tiny.logits(tiny.params, row, positions, documents)
    for number, length in enumerate(lengths, start=1):
        here = documents[0] == number
        alone = tiny.logits(tiny.params, row[:, here], np.arange(length)[None], None)
        np.testing.assert_allclose(packed[:, here], alone, atol=2e-6, rtol=1e-5)
    unmasked = tiny.logits(tiny.params, row, positions, None)
    assert np.abs(packed - unmasked)[:, lengths[0] :].max() > 1e-3


# ---- Generation


def test_token_by_token_gives_the_logits_of_the_whole_row(tiny):
    rows, length, prompt = 2, 9, 4
    tokens = tiny.tokens(rows, length)
    positions = np.broadcast_to(np.arange(length), (rows, length))
    whole = tiny.logits(tiny.params, tokens, positions, None)

    @jax.jit
    def extend(cache, tokens, positions):
        model = bind(tiny.model, tiny.params)
        x, cache, _ = model.features(tokens, positions, None, tiny.how, cache)
        return model.logits(x, tiny.how), cache

    cache = abstract_gpt(tiny.config).empty_cache(rows, length + 3, tiny.how)
    logits, cache = extend(cache, tokens[:, :prompt], positions[:, :prompt])
    pieces = [logits]
    for t in range(prompt, length):
        logits, cache = extend(cache, tokens[:, t : t + 1], positions[:, t : t + 1])
        pieces.append(logits)
    lengths = [n for stack in cache for n in stack.length.tolist()]
    assert lengths == [length] * tiny.config.num_layers
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=5e-6, rtol=1e-5)


# ---- Initialisation


@pytest.fixture(scope="module")
def gpt2(composed):
    """The published initialisation, of a narrower model."""
    narrow = "model.embed_dim=384", "model.num_heads=6", "model.vocab_size=8192"
    config = composed("model=gpt2_124m", *narrow).model
    params = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0))))()
    return config, jax.tree.map(np.asarray, params)


def test_gpt2_starts_with_the_published_spreads(gpt2):
    config, params = gpt2
    into_residual = 0.02 / math.sqrt(2 * config.num_layers)
    for name, x in named(params):
        if name.endswith("scale"):
            assert (x == 1).all(), name
        elif name.endswith("bias"):
            assert (x == 0).all(), name
        else:
            narrow = "output" in name or "down" in name
            expected = into_residual if narrow else 0.02
            layers = (
                x.reshape(12, -1) if name.startswith("layers") else x.reshape(1, -1)
            )
            np.testing.assert_allclose(layers.std(1), expected, rtol=0.01, err_msg=name)
            assert abs(layers.mean()) < expected / 100, name
    layers = params["layers"]["mlp"]["up"]["weight"]
    assert (layers[0] != layers[1]).mean() > 0.99, "layers must not start alike"


def test_gpt2_starts_at_the_loss_of_a_guess(gpt2):
    config, params = gpt2
    model, how = abstract_gpt(config), Execution()
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(1, 65))

    @jax.jit
    def loss(params, tokens):
        bound = bind(model, params)
        x, *_ = bound.features(tokens[:, :-1], jnp.arange(64)[None], None, how)
        logp = jax.nn.log_softmax(bound.logits(x, how))
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], -1))

    assert loss(params, tokens) == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_initialisation_with_zeros_starts_silent(llama):
    config = replace(llama.config, init=Init.zero)
    born = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0))))()
    params = dict(named(born))
    silent = {"head.weight", "layers.attention.output.weight", "layers.mlp.down.weight"}
    assert {name for name, x in params.items() if not x.any()} == silent
    up = params["layers.mlp.up.weight"]
    assert up.std() == pytest.approx(config.embed_dim**-0.5, rel=0.1)


# ---- Depth, recomputation, the head


def test_a_deep_model_is_no_more_to_compile_than_a_shallow_one(llama):
    def lines(num_layers: int) -> int:
        model = abstract_gpt(replace(llama.config, num_layers=num_layers))

        def loss(params, tokens):
            positions = jnp.arange(tokens.shape[1])[None]
            x, *_ = bind(model, params).features(tokens, positions, None, llama.how)
            return x.sum()

        lowered = jax.jit(jax.grad(loss)).lower(params_of(model), llama.tokens(1, 8))
        return lowered.as_text().count("\n")

    assert lines(48) <= 1.05 * lines(6)


@pytest.mark.parametrize(("unroll", "barriers"), [(1, False), (2, False), (-1, True)])
def test_xla_does_not_undo_recomputation(llama, unroll, barriers):
    """It merges what is computed twice, unless a loop or a barrier is between."""
    model = abstract_gpt(replace(llama.config, num_layers=4, layer_unroll=unroll))
    how, positions = llama.how._replace(remat="full"), jnp.arange(8)[None]

    def loss(params):
        x, *_ = bind(model, params).features(positions, positions, None, how)
        return x.sum()

    text = jax.jit(jax.grad(loss)).lower(params_of(model)).as_text()
    assert ("optimization_barrier" in text) == barriers


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_vocabulary_is_padded_and_nothing_shows_it(llama, tied):
    config = replace(llama.config, vocab_size=1030, tied_head=tied)
    params = jax.jit(lambda: params_of(GPT(config, nnx.Rngs(0))))()
    table, model = params["embedding"]["weight"], abstract_gpt(config)
    assert table.shape == (1152, config.embed_dim)
    assert table[:1030].all()
    assert not table[1030:].any()
    model = bind(model, params)
    assert model.head_weight.shape[0 if tied else 1] == 1152
    x = jnp.ones((1, 4, config.embed_dim))
    assert model.logits(x, llama.how).shape == (1, 4, 1030)
    small = num_params(replace(config, vocab_size=1000))
    tables = 1 if tied else 2
    assert num_params(config) - small == tables * 30 * config.embed_dim


def test_a_soft_cap_bounds_the_logits(tiny):
    x = 1e4 * jax.random.normal(jax.random.key(3), (1, 4, tiny.config.embed_dim))

    def logits(cap):
        model = bind(
            abstract_gpt(replace(tiny.config, logit_soft_cap=cap)), tiny.params
        )
        return model.logits(x, tiny.how)

    free, capped = logits(None), logits(30.0)
    assert np.abs(free).max() > 100
    assert np.abs(capped).max() <= 30
    np.testing.assert_allclose(capped, 30 * np.tanh(free / 30), rtol=1e-5)


def test_a_tied_head_is_the_embedding(tiny):
    tied = abstract_gpt(replace(tiny.config, tied_head=True))
    untied = abstract_gpt(replace(tiny.config, tied_head=False))
    size = tiny.config.vocab_size * tiny.config.embed_dim
    assert "head" not in params_of(tied)
    assert num_params(untied.config) - num_params(tied.config) == size
    params = {k: v for k, v in tiny.params.items() if k != "head"}
    x = jnp.eye(tiny.config.embed_dim)[None]
    logits = bind(tied, params).logits(x, tiny.how)[0]
    cap = tiny.config.logit_soft_cap
    table = params["embedding"]["weight"].T
    expected = table if cap is None else cap * np.tanh(table / cap)
    np.testing.assert_allclose(logits, expected, rtol=1e-5)


def test_binding_leaves_the_model_as_it_was(tiny):
    bound = bind(tiny.model, tiny.params)
    jax.tree.map(np.testing.assert_array_equal, params_of(bound), tiny.params)
    before = jax.tree.leaves(params_of(tiny.model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in before)
