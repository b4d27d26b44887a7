"""How moments are kept between steps: in float32, bfloat16 or eight bits.

An update computes in float32: moments are unpacked before it, and packed behind it with
stochastic rounding (train/optimizer/rounding.py). Entry by entry, and alike on every
mesh: of what lies elsewhere only maxima are needed, which are exact in any order.

Eight bits are the code c of a level c**p, times a scale:

- The scale of an entry is the least of the largest entries of its row and its column,
  of the matrix that the parameter is. So one large entry coarsens none but itself, as
  in blocks, but nothing is cut into blocks: these would have to fit into the parts of
  every mesh, and into a TPU's tiles. Source: rank-1 normalization of Li, Chen and Zhu,
  Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 4.2.
- A mean has a sign and 127 levels of p = 2, a mean square 255 of p = 4: the square
  root, of which the update is a quotient with the mean, has p = 2 too. So levels grow
  finer towards zero, both alike, and of an entry a thousandth as large as its scale
  four levels, or eight, are below. Evenly spaced levels have none there.
- A mean square never falls to zero where its scale is not (level 1 is the least): the
  update divides by it. Section 4.1 of the same source shows what becomes of it else.
  Where all of a row or column is zero the scale is, and so is what is unpacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from model.params import ParamInfo, is_info
from train.config import MomentDtype
from train.optimizer.rounding import key_of_step, random_bits, to_bfloat16

_SQUARES = "nu"  # optax's name of means of squares: without a sign
_TINY = float(jnp.finfo(jnp.float32).tiny)


class EightBits(NamedTuple):
    """An array of shape [..., I, O] as codes, with the largest entries of its parts.

    codes: int8, or of a mean square uint8, of the array's shape.
    rows: float32, of the array's shape but for the dims of outputs, which are 1; of
        vectors those of inputs are, too.
    columns: the same, but only those of inputs are 1; None of vectors.
    """

    codes: jax.Array
    rows: jax.Array
    columns: jax.Array | None

    @property
    def scale(self) -> jax.Array:
        """The level of the highest code, of each entry."""
        return _least(self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class Storage:
    """How weights and moments are stored between updates, which compute in float32.

    dtype: the dtype of the moments.
    infos: tree of `ParamInfo`.
    seed: the seed of stochastic rounding.
    """

    dtype: MomentDtype
    infos: Any
    seed: int

    def packed(self, state: Any, step: jax.Array, layer: Any = 0) -> Any:
        """Return optax's state with its moments as they are stored after a step.

        Stacked layers may be only a part of all layers, beginning at `layer`.
        """
        if self.dtype is MomentDtype.float32:
            return state
        key = key_of_step(self.seed, step)
        pairs = jax.tree_util.tree_leaves_with_path(self.infos, is_leaf=is_info)
        infos = dict(pairs)

        def pack(path: Any, leaf: jax.Array) -> Any:
            ends = (path[start:] for start in range(len(path)))
            info = next((infos[end] for end in ends if end in infos), None)
            if info is None:  # a count
                return leaf
            bits = random_bits(key, jax.tree_util.keystr(path), leaf.shape, layer)
            match self.dtype:
                case MomentDtype.float32:
                    return leaf
                case MomentDtype.bfloat16:
                    return to_bfloat16(leaf, bits)
                case MomentDtype.int8:
                    fields = (getattr(part, "name", None) for part in path)
                    return to_eight_bits(leaf, info, _SQUARES not in fields, bits)
                case _:
                    assert_never(self.dtype)

        return jax.tree_util.tree_map_with_path(pack, state)

    def repacked(self, state: Any, step: jax.Array) -> Any:
        """Convert a state whose moments were stored in another way."""
        state = jax.device_put(state, jax.memory.Space.Device)  # from the host's, too
        return self.packed(unpacked(state), step)

    def rounded(
        self, weights: Any, params: Any, step: jax.Array, layer: Any = 0
    ) -> Any:
        """Return float32 weights in the dtypes of the parameters that they replace.

        Of stacked layers there may be only some, from `layer` on.
        """

        def rounded(path: Any, weight: jax.Array, param: jax.Array) -> jax.Array:
            if param.dtype != jnp.bfloat16:
                return weight.astype(param.dtype)
            key, name = key_of_step(self.seed, step), jax.tree_util.keystr(path)
            return to_bfloat16(weight, random_bits(key, name, weight.shape, layer))

        return jax.tree_util.tree_map_with_path(rounded, weights, params)


def unpacked(state: Any) -> Any:
    """Return an optimizer's state with its moments in float32."""

    def unpack(leaf: Any) -> Any:
        if is_eight_bits(leaf):
            return from_eight_bits(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(unpack, state, is_leaf=is_eight_bits)


def as_kept_before(wanted: Any, saved: Mapping[str, Any]) -> Any:
    """Return what to load of moments that are wanted in another format than saved.

    Args:
        wanted: tree of `jax.ShapeDtypeStruct` with shardings.
        saved: shapes and dtypes by name.
    """

    def as_saved(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if is_eight_bits(leaf) and name in saved:
            return leaf.codes.update(dtype=jnp.float32)
        if is_eight_bits(leaf) or f"{name}.codes" not in saved:
            return leaf
        parts = (saved.get(f"{name}.{field}") for field in EightBits._fields)
        return EightBits(*(_beside(leaf, part) for part in parts))

    return jax.tree_util.tree_map_with_path(as_saved, wanted, is_leaf=is_eight_bits)


def _beside(leaf: Any, part: Any) -> Any:
    """Describe codes or maxima of an array, which are sharded as it is."""
    if part is None:  # vectors have none
        return None
    spec = (*leaf.sharding.spec, *(None for _ in leaf.shape))
    dims = zip(part.shape, leaf.shape, spec, strict=False)
    entries = (entry if own == dim else None for own, dim, entry in dims)
    where = NamedSharding(leaf.sharding.mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=where)


def is_eight_bits(node: object) -> bool:
    """Return whether a node of a state is an array kept in eight bits."""
    return isinstance(node, EightBits)


def to_eight_bits(
    x: jax.Array, info: ParamInfo, signed: bool, bits: jax.Array
) -> EightBits:
    """Round an array stochastically to eight bits.

    Args:
        x: float32, with the parameter's shape.
        info: the parameter's `ParamInfo`.
        signed: whether it is a mean. Otherwise it is a mean square, and not negative.
        bits: uint32 random bits, with the same shape.
    """
    size, first, split = jnp.abs(x), info.stack, info.split
    is_vector = split == x.ndim
    outputs = tuple(range(first if is_vector else split, x.ndim))
    rows, columns = jnp.max(size, outputs, keepdims=True), None
    if not is_vector:
        columns = jnp.max(size, tuple(range(first, split)), keepdims=True)
    top, power = _levels(signed)
    part = size / jnp.maximum(_least(rows, columns), _TINY)
    root = jnp.sqrt(part) if signed else jnp.sqrt(jnp.sqrt(part))
    below = jnp.floor(root * top)
    level, low, high = part * float(top) ** power, below**power, (below + 1) ** power
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24  # below 1
    code = jnp.where(level - low > chance * (high - low), below + 1, below)
    code = jnp.clip(code, 0 if signed else 1, top)
    code = jnp.where(x < 0, -code, code) if signed else code
    return EightBits(code.astype(jnp.int8 if signed else jnp.uint8), rows, columns)


def from_eight_bits(x: EightBits) -> jax.Array:
    """Return the float32 array that codes stand for."""
    signed = x.codes.dtype == jnp.int8
    top, power = _levels(signed)
    part = x.codes.astype(jnp.float32) / top
    level = part * jnp.abs(part) if signed else part**power
    return level * x.scale


def _levels(signed: bool) -> tuple[int, int]:
    """Return the highest code, and the power of a code that is its level."""
    return (127, 2) if signed else (255, 4)


def _least(rows: jax.Array, columns: jax.Array | None) -> jax.Array:
    return rows if columns is None else jnp.minimum(rows, columns)
