"""The record of a mixer: all that others must know of it, without JAX.

The record of a mixer lies next to its layer (`kind.py`), and model/mixer_catalog.py
lists all records.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from model.config import ModelConfig

if TYPE_CHECKING:
    from flax import nnx


class SharedDim(NamedTuple):
    """A dim that mesh axes must divide.

    axis: the logical axis of the dim.
    key: the key below `model.` that sets its size.
    """

    axis: str
    key: str
    size: int


class LeastPiece(NamedTuple):
    """The fewest positions of a row that a device must hold.

    reason: what needs them, as the subject of a sentence and its verb.
    key: the key below `model.` that sets the number.
    """

    positions: int
    reason: str
    key: str


@dataclass(frozen=True)
class MixerKind:
    """A mixer, as the rest of the program sees it.

    make: returns the module, which has the call signature of `SelfAttention`.
    dims: lists the dims that mesh axes must divide.
    flops: returns the FLOPs of a token besides its products with weights, given the
        window of the layer and the length of rows (train/core/model_flops.py).
    flops_formula: these FLOPs, summed over layers, as plans and starts show them.
    keys: prefixes of the keys below `model.` that have an effect only on such mixers.
    attends: whether queries have scores for keys, which windows and QK-clip limit.
    least_piece: returns the shortest piece of a row on a device that shares rows; None
        if any length will do.
    """

    make: "Callable[[ModelConfig, nnx.Rngs], Any]"
    dims: Callable[[ModelConfig], list[SharedDim]]
    flops: Callable[[ModelConfig, int | None, int], int]
    flops_formula: str
    keys: tuple[str, ...] = ()
    attends: bool = True
    least_piece: Callable[[ModelConfig], LeastPiece] | None = None
