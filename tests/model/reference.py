"""The model written straight through, apart from its own code: a reference."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig
from model.pattern import segments_of


def reference_loss(params, config: ModelConfig, tokens):
    """Tiny.loss in the dtype of `params`, layer by layer, all of it written out."""
    p = params
    T = tokens.shape[1] - 1
    x = p["embedding"]["weight"][tokens[:, :-1]]
    x = x * math.sqrt(config.embed_dim) if config.scaled_embedding else x
    if config.position == "learned":
        x = x + p["positions"]["weight"][:T]
    for index in range(config.num_layers):
        layer = layer_of(p, config, index)
        after = config.norm_placement == "both"
        h = norm(x, config, **layer["attention_norm"])
        h = shifted(h, config, "attention")
        h = mixed(h, layer["attention"], config, index)
        x = x + (norm(h, config, **layer["attention_output_norm"]) if after else h)
        h = norm(x, config, **layer["mlp_norm"])
        mlp = layer["mlp"]
        h = shifted(h, config, "mlp")
        if "router" in mlp:
            x = x + sum(routed(h, mlp, config))
        else:
            h = linear(bent(h, mlp, config), mlp["down"])
            x = x + (norm(h, config, **layer["mlp_output_norm"]) if after else h)
    x = norm(x, config, **p["norm"])
    head = p["embedding"]["weight"].T if config.tied_head else p["head"]["weight"]
    return nats(x @ head, config.logit_soft_cap, tokens[:, 1:])


def layer_of(p, config: ModelConfig, index: int):
    """Take a layer's parameters from the place of the segment that has them."""
    for i, (pattern, repeats, first) in enumerate(segments_of(config)):
        repeat, place = divmod(index - first, len(pattern))
        if repeat in range(repeats):
            stacked = p["layers"][str(i)][str(place)]
            return jax.tree.map(lambda a, at=repeat: a[at], stacked)
    raise IndexError(index)


def shifted(h, config: ModelConfig, part: str):
    if config.token_shift not in (part, "both"):
        return h
    is_shifted = jnp.arange(h.shape[-1]) < h.shape[-1] // 4
    return jnp.where(is_shifted, jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1], h)


# ---- Attention


def mixed(h, part, config: ModelConfig, index: int):
    if config.mixers[index] == "gated_delta":
        return delta(h, part, config)
    if config.mixers[index] == "latent_attention":
        return latent_attention(h, part, config)
    return attention(h, part, config, index)


def attention(h, part, config: ModelConfig, index: int):
    q, k, v = (linear(h, part[name]) for name in ("query", "key", "value"))
    q, gate = jnp.split(q, 2, -1) if config.attention_gate else (q, jnp.inf)
    if config.qk_norm:
        q = norm(q, config, part["query_norm"]["scale"], centre=False)
        k = norm(k, config, part["key_norm"]["scale"], centre=False)
    if config.position == "rotary":
        local = config.windows[index] is not None and config.rope_theta_local
        theta = local or config.rope_theta
        q, k = (turned(y, theta, config.rotary_dim) for y in (q, k))
    scale = (config.query_scale_dim or config.head_size) ** -0.5
    seen = mask(h.shape[1], config.windows[index])[None, None]
    cap = config.attention_soft_cap
    sinks = part.get("sinks")
    heads = attend(q, k, v, seen, scale=scale, soft_cap=cap, sinks=sinks)
    return linear(heads * sigmoid(gate), part["output"], 2)


def latent_attention(h, part, config: ModelConfig):
    config = dataclasses.replace(config, norm_epsilon=1e-6)
    P = config.nope_head_dim
    R = config.rope_head_dim

    def rotated(x):
        return turned(x, config.rope_theta, R)

    q = linear(h, part["query_down"])
    q = norm(q, config, part["query_norm"]["scale"], centre=False)
    q = linear(q, part["query_up"])
    latent = linear(h, part["key_value_down"])
    c = latent[..., : config.kv_rank]
    k_rope = latent[..., None, config.kv_rank :]
    c = norm(c, config, part["key_value_norm"]["scale"], centre=False)
    kv = linear(c, part["key_value_up"])
    k_rope = jnp.repeat(rotated(k_rope), config.num_heads, 2)
    k = jnp.concatenate([kv[..., :P], k_rope], -1)
    q = jnp.concatenate([q[..., :P], rotated(q[..., P:])], -1)
    heads = attend(q, k, kv[..., P:], mask(h.shape[1], None)[None, None])
    return linear(heads, part["output"], 2)


def attend(q, k, v, seen, *, scale=None, soft_cap=None, sinks=None):
    """Attend where `seen` [B, 1, T, S] is true."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (scale or q.shape[-1] ** -0.5)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jnp.where(seen, jnp.exp(scores), 0)
    sums = weights.sum(-1, keepdims=True)
    if sinks is not None:
        sums = sums + jnp.exp(sinks)[None, :, None, None]
    return jnp.einsum("bnts,bsnh->btnh", weights / sums, v)


def turned(x, theta, R):  # each pair of dims (i, i + R/2) as one complex number
    exponents = np.arange(R // 2) / (R // 2)
    angles = np.arange(x.shape[1])[:, None] * theta**-exponents
    z = x[..., : R // 2] + 1j * x[..., R // 2 : R]
    z = z * np.exp(1j * angles)[None, :, None]
    return jnp.concatenate([z.real, z.imag, x[..., R:]], -1)


def mask(T, window):
    behind = np.arange(T)[:, None] - np.arange(T)
    return (behind >= 0) & (behind < (window or T))


def delta(h, part, config: ModelConfig):
    """A gated delta net, position by position."""
    q, k, v = (
        convolved(linear(h, part[name]), part[f"{name}_taps"])
        for name in ("query", "key", "value")
    )
    q, k = (y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    heads = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(y, heads, 2) for y in (q / q.shape[-1] ** 0.5, k))
    keep = jnp.exp(
        -jnp.exp(part["A_log"])
        * jnp.logaddexp(linear(h, part["dt"]) + part["dt_bias"], 0)
    )
    o = recurrence(q, k, v, keep, sigmoid(linear(h, part["beta"])))
    o = o / jnp.sqrt((o**2).mean(-1, keepdims=True) + config.norm_epsilon)
    z = linear(h, part["gate"])
    return linear(o * part["output_norm"]["scale"] * z * sigmoid(z), part["output"], 2)


def recurrence(q, k, v, keep, beta):
    """The gated delta rule for [B, T, N, ...], position by position."""

    def step(state, inputs):
        q, k, v, keep, beta = inputs
        state = state * keep[..., None, None]
        held = jnp.einsum("bnh,bnhv->bnv", k, state)
        state += jnp.einsum("bnh,bnv->bnhv", k, beta[..., None] * (v - held))
        return state, jnp.einsum("bnh,bnhv->bnv", q, state)

    inputs = (jnp.moveaxis(y, 1, 0) for y in (q, k, v, keep, beta))
    state = jnp.zeros((*k[:, 0].shape, v.shape[-1]), v.dtype)
    return jnp.moveaxis(jax.lax.scan(step, state, (*inputs,))[1], 0, 1)


def convolved(x, taps):
    past = jnp.pad(x, ((0, 0), (taps.shape[-1] - 1, 0), (0, 0), (0, 0)))
    shifted = [past[:, s : s + x.shape[1]] for s in range(taps.shape[-1])]
    y = sum(taps[..., s] * part for s, part in enumerate(shifted))
    return y * sigmoid(y)


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


# ---- MLP


def bent(x, mlp, config: ModelConfig):
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


def routed(x, mlp, config: ModelConfig):
    """Yield what each expert adds, and what the shared one does."""
    scores = 1 / (1 + jnp.exp(-linear(x, mlp["router"])))
    ranked = scores + mlp["router"]["balance"]
    least = jnp.sort(ranked)[..., -config.experts_per_token]
    weights = jnp.where(ranked >= least[..., None], scores, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    for e in range(config.num_experts):
        own = {k: {"weight": mlp[k][e]} for k in ("gate", "up", "down")}
        for k in own if config.bias else ():
            own[k]["bias"] = mlp[f"{k}_bias"][e]
        yield weights[..., e : e + 1] * linear(bent(x, own, config), own["down"])
    yield linear(bent(x, mlp["shared"], config), mlp["shared"]["down"])


# ---- What all are made of


def linear(x, layer, inputs=1):
    y = jnp.tensordot(x, layer["weight"], inputs)
    return y + layer["bias"] if "bias" in layer else y


def norm(x, config: ModelConfig, scale, bias=None, centre=True):
    over = tuple(range(-scale.ndim, 0))
    centre = centre and config.norm == "layernorm"
    x = x - x.mean(over, keepdims=True) if centre else x
    x = x / jnp.sqrt((x**2).mean(over, keepdims=True) + config.norm_epsilon)
    x = x * (1 + scale if config.norm_unit_offset else scale)
    return x if bias is None else x + bias


def nats(logits, cap, targets):
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    logp = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    return -jnp.take_along_axis(logp, targets[..., None], -1).mean()
