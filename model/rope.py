"""Rotary positions, and the formulas that stretch them.

Pair i of position p is rotated by p f, f = theta^(-2i/R) being its frequency. A model
that goes on to longer rows keeps the fast pairs, which tell near positions apart, and
slows the others down.

Shapes: B batch, T time, N heads, H head dim, P pairs that are rotated, R = 2P.
"""

import math
from typing import NamedTuple, assert_never

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.attention.masks import Local
from model.choices import RopeScaling, Scaling
from model.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines [B, T, 1, P] of the angles by which positions rotate pairs."""

    cos: Float[Array, "B T 1 P"]
    sin: Float[Array, "B T 1 P"]


class Rotations(NamedTuple):
    """The rotation of each kind of layer; local ones may have none of their own."""

    usual: Rotation
    local: Rotation | None

    def of(self, local: Local | bool) -> Rotation:
        """Return the rotation of a layer."""
        if self.local is None or local is False:
            return self.usual
        if local is True:
            return self.local
        both = zip(self.local, self.usual, strict=True)
        return Rotation(*(jnp.where(local.flag, own, usual) for own, usual in both))


def rotations(positions_BT: Int[Array, "B T"], config: ModelConfig) -> Rotations:
    """Return by what positions are rotated.

    Source: RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    scaling, local = config.rope_scaling, None
    if config.rope_theta_local is not None:
        unscaled = config.rope_theta_local, RopeScaling()
        local = _rotation(positions_BT, config.rotary_dim, *unscaled)
    usual = _rotation(positions_BT, config.rotary_dim, config.rope_theta, scaling)
    return Rotations(usual, local)


def _rotation(
    positions_BT: Int[Array, "B T"], R: int, theta: float, scaling: RopeScaling
) -> Rotation:
    rates = frequencies(R, theta, scaling)
    angles = positions_BT[..., None, None].astype(jnp.float32) * rates[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling.kind is not Scaling.yarn:
        return Rotation(cos, sin)
    return Rotation(scaling.yarn_factor * cos, scaling.yarn_factor * sin)


def frequencies(R: int, theta: float, scaling: RopeScaling) -> Float[Array, "P"]:
    """Return the frequencies of R/2 pairs.

    Sources: arXiv:2306.15595 (linear), Llama 3.1's own code (llama3), YaRN,
    arXiv:2309.00071, section 3.2; bounds of the last are whole pairs with `truncate`.
    """
    pairs = R // 2
    usual = theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    slowed, length = usual / scaling.factor, scaling.original_length or 0
    slow, fast = scaling.slow_turns, scaling.most_turns
    match scaling.kind:
        case Scaling.none:
            return usual
        case Scaling.linear:
            return slowed
        case Scaling.llama3:
            turns = usual * (length / (2 * math.pi))
            kept = jnp.clip((turns - slow) / (fast - slow), 0, 1)
        case Scaling.yarn:
            # The pairs that turn so often in a row of the earlier training.
            first, last = (
                R * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))
                for turns in (fast, slow)
            )
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, R - 1)
            behind = jnp.arange(pairs, dtype=jnp.float32) - first
            kept = 1 - jnp.clip(behind / (last - first or 0.001), 0, 1)
        case _:
            assert_never(scaling.kind)
    return kept * usual + (1 - kept) * slowed


def rotate(x_BTNH: Float[Array, "B T N H"], by: Rotation) -> Float[Array, "B T N H"]:
    """Rotate the first 2P head dims, pair (i, i+P); the others stay."""
    pairs = by.cos.shape[-1]
    x = x_BTNH.astype(jnp.float32)
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = [first * by.cos - second * by.sin, second * by.cos + first * by.sin]
    return jnp.concatenate([*turned, x[..., 2 * pairs :]], -1).astype(x_BTNH.dtype)
