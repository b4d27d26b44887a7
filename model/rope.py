"""Rotary positions, and the formulas that stretch them to longer rows.

At position p, pair i is rotated by the angle p f, with the frequency f = theta^(-2i/R).
To train a model further on longer rows, the frequencies are lowered (`RopeScaling`).
llama3 and yarn keep the frequencies of fast pairs, which distinguish near positions.

Shapes: B batch, T time, N heads, H head dim, P rotated pairs, R = 2P.
"""

import math
from typing import NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.choices import RopeScaling, Scaling
from model.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines of the angle of each position and pair."""

    cos: Float[Array, "B T 1 P"]
    sin: Float[Array, "B T 1 P"]


class Rotations(NamedTuple):
    """The rotation of global layers, and the rotation of local layers if different."""

    global_layers: Rotation
    local_layers: Rotation | None

    def for_layer(self, local_flag: Bool[Array, ""] | bool) -> Rotation:
        """Return the rotation of a layer. An array selects it at run time."""
        if self.local_layers is None or local_flag is False:
            return self.global_layers
        if local_flag is True:
            return self.local_layers
        pairs = zip(self.local_layers, self.global_layers, strict=True)
        return Rotation(*(jnp.where(local_flag, a, b) for a, b in pairs))


def make_rotations(positions_BT: Int[Array, "B T"], config: ModelConfig) -> Rotations:
    """Return the rotations at these positions. Source: RoFormer, arXiv:2104.09864."""
    R = config.rotary_dim
    theta_local = config.rope_theta_local
    local_layers = None
    if theta_local is not None:
        local_layers = _rotation(positions_BT, R, theta_local, RopeScaling())
    global_layers = _rotation(positions_BT, R, config.rope_theta, config.rope_scaling)
    return Rotations(global_layers, local_layers)


def _rotation(
    positions_BT: Int[Array, "B T"], R: int, theta: float, scaling: RopeScaling
) -> Rotation:
    frequencies_P = frequencies(R, theta, scaling)
    positions_BT11 = positions_BT[..., None, None].astype(jnp.float32)
    angles = positions_BT11 * frequencies_P[None, None, None]
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    if scaling.kind is not Scaling.yarn:
        return Rotation(cos, sin)
    return Rotation(scaling.yarn_factor * cos, scaling.yarn_factor * sin)


def frequencies(R: int, theta: float, scaling: RopeScaling) -> Float[Array, "P"]:
    """Return the frequencies of R/2 pairs of dims, slowed down as `scaling` says.

    Sources: arXiv:2306.15595 (linear), the code of Llama 3.1 (llama3), and
    arXiv:2309.00071, section 3.2 (yarn). `truncate` rounds the bounds between fast and
    slow pairs in yarn to integers.
    """
    num_pairs = R // 2
    unscaled = theta ** (-jnp.arange(num_pairs, dtype=jnp.float32) / num_pairs)
    slowed = unscaled / scaling.factor
    length = scaling.original_length or 0
    slow = scaling.slow_turns
    fast = scaling.fast_turns_or_default
    match scaling.kind:
        case Scaling.none:
            return unscaled
        case Scaling.linear:
            return slowed
        case Scaling.llama3:
            turns = unscaled * (length / (2 * math.pi))
            unscaled_share = jnp.clip((turns - slow) / (fast - slow), 0, 1)
        case Scaling.yarn:
            # The indices of the pairs that turn `fast` and `slow` times in a row of the
            # original length.
            low, high = (
                R * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))
                for turns in (fast, slow)
            )
            if scaling.truncate:
                low = math.floor(low)
                high = math.ceil(high)
            low = max(low, 0)
            high = min(high, R - 1)
            distance = jnp.arange(num_pairs, dtype=jnp.float32) - low
            unscaled_share = 1 - jnp.clip(distance / (high - low or 0.001), 0, 1)
        case _:
            assert_never(scaling.kind)
    return unscaled_share * unscaled + (1 - unscaled_share) * slowed


@jax.custom_vjp
def rotate(
    x_BTNH: Float[Array, "B T N H"], rotation: Rotation
) -> Float[Array, "B T N H"]:
    """Rotate the first 2P head dims, in pairs (i, i + P). Do not change the others.

    The rotation itself has no gradient.
    """
    return _rotate(x_BTNH, rotation.cos, rotation.sin)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    num_pairs = cos.shape[-1]
    # Slice before the conversion: XLA would store all of x in float32 otherwise.
    first, second = (
        x[..., start : start + num_pairs].astype(jnp.float32)
        for start in (0, num_pairs)
    )
    rotated = [first * cos - second * sin, second * cos + first * sin]
    rotated = [half.astype(x.dtype) for half in rotated]
    return jnp.concatenate([*rotated, x[..., 2 * num_pairs :]], -1)


def _rotate_forward(x_BTNH: Array, rotation: Rotation):
    return rotate(x_BTNH, rotation), rotation


def _rotate_backward(rotation: Rotation, dy_BTNH: Array):
    # The transpose of a rotation is the rotation by the opposite angle.
    return _rotate(dy_BTNH, rotation.cos, -rotation.sin), None


rotate.defvjp(_rotate_forward, _rotate_backward)
