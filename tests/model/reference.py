"""A reference model is written out here, without the code of the model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig
from model.pattern import segments_of


def reference_loss(params, config: ModelConfig, tokens):
    """Return the mean loss of the next token, in the dtype of `params`."""
    p = params
    T = tokens.shape[1] - 1
    x = p["embedding"]["weight"][tokens[:, :-1]]
    x = x * math.sqrt(config.embed_dim) if config.scaled_embedding else x
    if config.position == "learned":
        x = x + p["positions"]["weight"][:T]
    for index in range(config.num_layers):
        layer = layer_of(p, config, index)
        has_output_norm = config.norm_placement == "both"
        h = norm(x, config, **layer["attention_norm"])
        h = shift_channels(h, config, "attention")
        h = mix(h, layer["attention"], config, index)
        x = x + (
            norm(h, config, **layer["attention_output_norm"]) if has_output_norm else h
        )
        h = norm(x, config, **layer["mlp_norm"])
        mlp = layer["mlp"]
        h = shift_channels(h, config, "mlp")
        if "router" in mlp:
            x = x + sum(route(h, mlp, config))
        else:
            h = linear(activate(h, mlp, config), mlp["down"])
            x = x + (
                norm(h, config, **layer["mlp_output_norm"]) if has_output_norm else h
            )
    x = norm(x, config, **p["norm"])
    head = p["embedding"]["weight"].T if config.tied_head else p["head"]["weight"]
    return cross_entropy(x @ head, config.logit_soft_cap, tokens[:, 1:])


def layer_of(p, config: ModelConfig, index: int):
    """Return a layer's parameters.

    A segment stacks the parameters of the layers that have the same slot in its
    pattern, whatever the repeat (model/pattern.py).
    """
    for i, (pattern, num_repeats, first) in enumerate(segments_of(config)):
        row, slot = divmod(index - first, len(pattern))
        if 0 <= row < num_repeats:
            stacked = p["layers"][str(i)][str(slot)]
            return jax.tree.map(lambda a, row=row: a[row], stacked)
    raise IndexError(index)


def shift_channels(h, config: ModelConfig, reader: str):
    """Return a quarter of the channels from the position before, if so configured."""
    if config.token_shift not in (reader, "both"):
        return h
    is_shifted = jnp.arange(h.shape[-1]) < h.shape[-1] // 4
    return jnp.where(is_shifted, jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1], h)


# ---- Attention


def mix(h, part, config: ModelConfig, index: int):
    if config.mixers[index] == "gated_delta":
        return delta(h, part, config)
    if config.mixers[index] == "latent_attention":
        return latent_attention(h, part, config)
    return attention(h, part, config, index)


def attention(h, part, config: ModelConfig, index: int):
    q, k, v = (linear(h, part[name]) for name in ("query", "key", "value"))
    gate = jnp.inf  # whose sigmoid is 1
    if config.attention_gate:
        q, gate = jnp.split(q, 2, -1)
    if config.qk_norm:
        q = norm(q, config, part["query_norm"]["scale"], centre=False)
        k = norm(k, config, part["key_norm"]["scale"], centre=False)
    if config.position == "rotary":
        theta = config.rope_theta
        if config.windows[index] is not None:
            theta = config.rope_theta_local or theta
        q, k = (rotate(y, theta, config.rotary_dim) for y in (q, k))
    scale = (config.query_scale_dim or config.head_size) ** -0.5
    visible = mask(h.shape[1], config.windows[index])[None, None]
    cap = config.attention_soft_cap
    sinks = part.get("sinks")
    heads = attend(q, k, v, visible, scale=scale, soft_cap=cap, sinks=sinks)
    return linear(heads * sigmoid(gate), part["output"], num_input_dims=2)


def latent_attention(h, part, config: ModelConfig):
    # DeepSeek's norms of latents have this epsilon, whatever that of other norms.
    config = dataclasses.replace(config, norm_epsilon=1e-6)
    nope_dim = config.nope_head_dim
    rope_dim = config.rope_head_dim

    def rotate_rope(x):
        return rotate(x, config.rope_theta, rope_dim)

    q = linear(h, part["query_down"])
    q = norm(q, config, part["query_norm"]["scale"], centre=False)
    q = linear(q, part["query_up"])
    latent = linear(h, part["key_value_down"])
    c = latent[..., : config.kv_rank]
    k_rope = latent[..., None, config.kv_rank :]
    c = norm(c, config, part["key_value_norm"]["scale"], centre=False)
    kv = linear(c, part["key_value_up"])
    k_rope = jnp.repeat(rotate_rope(k_rope), config.num_heads, 2)
    k = jnp.concatenate([kv[..., :nope_dim], k_rope], -1)
    q = jnp.concatenate([q[..., :nope_dim], rotate_rope(q[..., nope_dim:])], -1)
    heads = attend(q, k, kv[..., nope_dim:], mask(h.shape[1], None)[None, None])
    return linear(heads, part["output"], num_input_dims=2)


def attend(q, k, v, visible, *, scale=None, soft_cap=None, sinks=None):
    """Attend where `visible` [B, 1, T, S] is true."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (scale or q.shape[-1] ** -0.5)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jnp.where(visible, jnp.exp(scores), 0)
    sums = weights.sum(-1, keepdims=True)
    if sinks is not None:
        sums = sums + jnp.exp(sinks)[None, :, None, None]
    return jnp.einsum("bnts,bsnh->btnh", weights / sums, v)


def rotate(x, theta, R):  # Each pair of dims (i, i + R/2) is one complex number.
    exponents = np.arange(R // 2) / (R // 2)
    angles = np.arange(x.shape[1])[:, None] * theta**-exponents
    z = x[..., : R // 2] + 1j * x[..., R // 2 : R]
    z = z * np.exp(1j * angles)[None, :, None]
    return jnp.concatenate([z.real, z.imag, x[..., R:]], -1)


def mask(T, window):
    distance = np.arange(T)[:, None] - np.arange(T)
    return (distance >= 0) & (distance < (window or T))


def delta(h, part, config: ModelConfig):
    """Apply a gated delta net, position by position."""
    q, k, v = (
        convolve_and_silu(linear(h, part[name]), part[f"{name}_taps"])
        for name in ("query", "key", "value")
    )
    q, k = (y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    values_per_key = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(y, values_per_key, 2) for y in (q / q.shape[-1] ** 0.5, k))
    decay = jnp.exp(
        -jnp.exp(part["A_log"])
        * jnp.logaddexp(linear(h, part["dt"]) + part["dt_bias"], 0)
    )
    o = recurrence(q, k, v, decay, sigmoid(linear(h, part["beta"])))
    o = o / jnp.sqrt((o**2).mean(-1, keepdims=True) + config.norm_epsilon)
    z = linear(h, part["gate"])
    return linear(
        o * part["output_norm"]["scale"] * z * sigmoid(z),
        part["output"],
        num_input_dims=2,
    )


def recurrence(q, k, v, decay, beta):
    """Run the gated delta rule on [B, T, N, ...], position by position."""

    def step(state, inputs):
        q, k, v, decay, beta = inputs
        state = state * decay[..., None, None]
        prediction = jnp.einsum("bnh,bnhv->bnv", k, state)
        state += jnp.einsum("bnh,bnv->bnhv", k, beta[..., None] * (v - prediction))
        return state, jnp.einsum("bnh,bnhv->bnv", q, state)

    inputs = (jnp.moveaxis(y, 1, 0) for y in (q, k, v, decay, beta))
    state = jnp.zeros((*k[:, 0].shape, v.shape[-1]), v.dtype)
    return jnp.moveaxis(jax.lax.scan(step, state, (*inputs,))[1], 0, 1)


def convolve_and_silu(x, taps):
    """Apply a causal convolution, whose last tap is for the position itself."""
    padded = jnp.pad(x, ((0, 0), (taps.shape[-1] - 1, 0), (0, 0), (0, 0)))
    shifted = [padded[:, s : s + x.shape[1]] for s in range(taps.shape[-1])]
    y = sum(taps[..., s] * inputs for s, inputs in enumerate(shifted))
    return y * sigmoid(y)


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


# ---- MLP


def activate(x, mlp, config: ModelConfig):
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


def gelu(x):
    return x / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def route(x, mlp, config: ModelConfig):
    """Yield the output of each expert, and then that of the shared one."""
    scores = 1 / (1 + jnp.exp(-linear(x, mlp["router"])))
    balanced_scores = scores + mlp["router"]["balance"]
    threshold = jnp.sort(balanced_scores)[..., -config.experts_per_token]
    weights = jnp.where(balanced_scores >= threshold[..., None], scores, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    for e in range(config.num_experts):
        expert = {k: {"weight": mlp[k][e]} for k in ("gate", "up", "down")}
        if config.bias:
            for k in expert:
                expert[k]["bias"] = mlp[f"{k}_bias"][e]
        yield weights[..., e : e + 1] * linear(
            activate(x, expert, config), expert["down"]
        )
    yield linear(activate(x, mlp["shared"], config), mlp["shared"]["down"])


# ---- Shared operations


def linear(x, layer, num_input_dims=1):
    y = jnp.tensordot(x, layer["weight"], num_input_dims)
    return y + layer["bias"] if "bias" in layer else y


def norm(x, config: ModelConfig, scale, bias=None, centre=True):
    dims = tuple(range(-scale.ndim, 0))
    centre = centre and config.norm == "layernorm"
    x = x - x.mean(dims, keepdims=True) if centre else x
    x = x / jnp.sqrt((x**2).mean(dims, keepdims=True) + config.norm_epsilon)
    x = x * (1 + scale if config.norm_unit_offset else scale)
    return x if bias is None else x + bias


def cross_entropy(logits, cap, targets):
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    logp = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    return -jnp.take_along_axis(logp, targets[..., None], -1).mean()
