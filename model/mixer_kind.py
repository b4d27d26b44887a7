"""The record of a mixer: all that others must know of it, without JAX.

The record of a mixer lies next to its layer (`kind.py`), and model/mixer_catalog.py
lists all records.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from data.errors import Mistake
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

    name: the value of `model.mixer`.
    make: returns the module, which has the call signature of `SelfAttention`.
    dims: lists the dims that mesh axes must divide.
    flops: returns the FLOPs of a token besides its products with weights, given the
        window of the layer and the length of rows (train/core/model_flops.py).
    flops_formula: these FLOPs, summed over layers, as plans and starts show them.
    section: the frozen dataclass of the mixer's own keys, which are
        `model.parts.<name>.<key>`; `ModelConfig.part` returns its values.
    rules: returns the mistakes in the keys of the mixer, and in other keys that it does
        not go with.
    keys: prefixes of the other keys below `model.` that have an effect only on such
        mixers.
    small_sizes: sizes for `train.prove`, which shrinks models, by key below `model.`.
    width_keys: keys below `model.` of sizes that grow with the width of the model.
    attends: whether queries have scores for keys, which windows and QK-clip limit.
    least_piece: returns the shortest piece of a row on a device that shares rows; None
        if any length will do.
    """

    name: str
    make: "Callable[[ModelConfig, nnx.Rngs], Any]"
    dims: Callable[[ModelConfig], list[SharedDim]]
    flops: Callable[[ModelConfig, int | None, int], int]
    flops_formula: str
    section: type | None = None
    rules: Callable[[ModelConfig], Iterable[Mistake]] = lambda model: ()
    keys: tuple[str, ...] = ()
    small_sizes: Mapping[str, int] = field(default_factory=dict)
    width_keys: tuple[str, ...] = ()
    attends: bool = True
    least_piece: Callable[[ModelConfig], LeastPiece] | None = None
