"""Store moments between steps in float32, bfloat16 or eight bits.

An update is computed in float32. Moments are decoded before the update and encoded
after it, with stochastic rounding (`rounding.py`). The result is the same
on every mesh: each entry is encoded by itself, and devices exchange only maxima, which
are exact in any order.

An eight-bit entry is a code c, which stands for scale * (c / max_code)**p:

- The scale of an entry is the maximum of its row or of its column in the parameter's
  matrix, whichever is smaller. So one large entry makes no other entry coarser. One
  scale for each block of entries would achieve this too, but blocks would have to fit
  the shards of every mesh and the tiles of a TPU. Source: rank-1 normalization (section
  4.2) of Li, Chen and Zhu, Memory Efficient Optimizers with 4-bit States,
  arXiv:2309.01507.
- A mean has a sign and 127 levels with p = 2. A mean square has 255 levels with p = 4,
  because the update divides by its root, whose levels then have p = 2 as well. So
  levels are finer near zero: below a thousandth of the scale, a mean has four levels,
  and the root of a mean square has eight. Evenly spaced levels would have none there.
- The least code of a mean square is 1, because the update divides by the root. Section
  4.1 of the same source shows the damage that zeros would do. If all entries of a row
  or column are zero, the scale is zero, and they decode to zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from model.params import ParamInfo, is_info, name_in_layer
from train.core.choices import MomentDtype
from train.core.optimizer.rounding import key_of_step, random_bits, to_bfloat16

_MEAN_SQUARES = "nu"  # optax's name for mean squares, which have no sign
_TINY = float(jnp.finfo(jnp.float32).tiny)


class EightBits(NamedTuple):
    """An array [..., I, O] as codes, with the maxima of its rows and columns.

    codes: int8 with the array's shape; uint8 for a mean square.
    rows: float32 maxima over the output dims, which get size 1; one for a vector.
    columns: float32 maxima over the input dims, which get size 1; None for a vector.
    """

    codes: jax.Array
    rows: jax.Array
    columns: jax.Array | None


@dataclass(frozen=True, eq=False)
class MomentStorage:
    """Encodes moments and rounds weights after an update in float32.

    dtype: the format of moments.
    infos: tree of `ParamInfo`.
    seed: the seed of stochastic rounding.
    """

    dtype: MomentDtype
    infos: Any
    seed: int

    def encode(self, state: Any, step: jax.Array, repeat: Any = 0) -> Any:
        """Return optax's state with its moments in the format of this storage.

        Stacked arrays may hold only some repeats of a pattern, beginning with `repeat`.
        """
        if self.dtype is MomentDtype.float32:
            return state
        key = key_of_step(self.seed, step)
        infos = self._infos_by_path()

        def encode_leaf(path: Any, leaf: jax.Array) -> Any:
            suffixes = (path[start:] for start in range(len(path)))
            info = next((infos[s] for s in suffixes if s in infos), None)
            if info is None:  # an update count, or squares of Adafactor
                return leaf
            bits = _random_bits(key, path, info, leaf.shape, repeat)
            match self.dtype:
                case MomentDtype.float32:
                    return leaf
                case MomentDtype.bfloat16:
                    return to_bfloat16(leaf, bits)
                case MomentDtype.int8:
                    fields = (getattr(entry, "name", None) for entry in path)
                    return to_eight_bits(leaf, info, _MEAN_SQUARES not in fields, bits)
                case _:
                    assert_never(self.dtype)

        return jax.tree_util.tree_map_with_path(encode_leaf, state)

    def convert(self, state: Any, step: jax.Array) -> Any:
        """Convert a state from any format and memory to this format, on the device."""
        state = jax.device_put(state, jax.memory.Space.Device)
        return self.encode(decode_moments(state), step)

    def round_weights(
        self, weights: Any, params: Any, step: jax.Array, repeat: Any = 0
    ) -> Any:
        """Round float32 weights to the dtypes of the parameters that they replace.

        Stacked arrays may hold only some repeats of a pattern, beginning with `repeat`.
        """
        infos = self._infos_by_path()

        def round_leaf(path: Any, weight: jax.Array, param: jax.Array) -> jax.Array:
            if param.dtype != jnp.bfloat16:
                return weight.astype(param.dtype)
            key = key_of_step(self.seed, step)
            bits = _random_bits(key, path, infos[path], weight.shape, repeat)
            return to_bfloat16(weight, bits)

        return jax.tree_util.tree_map_with_path(round_leaf, weights, params)

    def _infos_by_path(self) -> dict[Any, ParamInfo]:
        return dict(jax.tree_util.tree_leaves_with_path(self.infos, is_leaf=is_info))


def _random_bits(
    key: jax.Array, path: Any, info: ParamInfo, shape: tuple[int, ...], repeat: Any
) -> jax.Array:
    """Return random bits that depend on the numbers of layers, not on their segments.

    The array at `path` holds repeats of a pattern, beginning with `repeat`.
    """
    numbers = info.layers
    start = numbers.start + repeat * numbers.step
    return random_bits(key, name_in_layer(path), shape, start, numbers.step)


def decode_moments(state: Any) -> Any:
    """Return an optimizer's state with its moments in float32."""

    def decode_leaf(leaf: Any) -> Any:
        if is_eight_bits(leaf):
            return from_eight_bits(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(decode_leaf, state, is_leaf=is_eight_bits)


def in_saved_format(wanted: Any, saved: Mapping[str, Any]) -> Any:
    """Return `wanted`, with moments in the format in which they were saved.

    Args:
        wanted: tree of `jax.ShapeDtypeStruct` with shardings.
        saved: the saved shapes and dtypes by name.
    """

    def saved_leaf(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if is_eight_bits(leaf) and name in saved:
            return leaf.codes.update(dtype=jnp.float32)
        if is_eight_bits(leaf) or f"{name}.codes" not in saved:
            return leaf
        fields = (saved.get(f"{name}.{field}") for field in EightBits._fields)
        return EightBits(*(_sharded_like(leaf, field) for field in fields))

    return jax.tree_util.tree_map_with_path(saved_leaf, wanted, is_leaf=is_eight_bits)


def _sharded_like(leaf: Any, field: Any) -> Any:
    """Return the shape of codes or maxima, sharded like the array that they encode."""
    if field is None:  # a vector has no columns
        return None
    spec = (*leaf.sharding.spec, *(None for _ in leaf.shape))
    dims = zip(field.shape, leaf.shape, spec, strict=False)
    entries = (entry if n == full_size else None for n, full_size, entry in dims)
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=sharding)


def is_eight_bits(node: object) -> bool:
    """Return whether a node of a state is an array in eight bits."""
    return isinstance(node, EightBits)


def to_eight_bits(
    x: jax.Array, info: ParamInfo, signed: bool, bits: jax.Array
) -> EightBits:
    """Round a float32 mean (signed) or mean square of a parameter to codes.

    `bits` are random uint32 with the same shape.
    """
    magnitude = jnp.abs(x)
    start = info.stack_dims
    stop = info.output_start
    is_vector = stop == x.ndim
    output_dims = tuple(range(start if is_vector else stop, x.ndim))
    rows = jnp.max(magnitude, output_dims, keepdims=True)
    columns = None
    if not is_vector:
        columns = jnp.max(magnitude, tuple(range(start, stop)), keepdims=True)
    max_code, power = _max_code_and_power(signed)
    fraction = magnitude / jnp.maximum(_scale(rows, columns), _TINY)
    root = jnp.sqrt(fraction) if signed else jnp.sqrt(jnp.sqrt(fraction))
    code = jnp.floor(root * max_code)
    level = fraction * float(max_code) ** power
    low = code**power
    high = (code + 1) ** power
    threshold = (bits >> 8).astype(jnp.float32) * 2.0**-24  # below 1
    code = jnp.where(level - low > threshold * (high - low), code + 1, code)
    code = jnp.clip(code, 0 if signed else 1, max_code)
    code = jnp.where(x < 0, -code, code) if signed else code
    return EightBits(code.astype(jnp.int8 if signed else jnp.uint8), rows, columns)


def from_eight_bits(x: EightBits) -> jax.Array:
    """Return the float32 array that the codes represent."""
    signed = x.codes.dtype == jnp.int8
    max_code, power = _max_code_and_power(signed)
    root = x.codes.astype(jnp.float32) / max_code
    level = root * jnp.abs(root) if signed else root**power
    return level * _scale(x.rows, x.columns)


def _max_code_and_power(signed: bool) -> tuple[int, int]:
    """Return the highest code, and the exponent that turns codes into levels."""
    return (127, 2) if signed else (255, 4)


def _scale(rows: jax.Array, columns: jax.Array | None) -> jax.Array:
    return rows if columns is None else jnp.minimum(rows, columns)
