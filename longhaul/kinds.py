"""The records of parts that users add, and the types of their fields, without JAX.

The built-in mixers and formats of text have the same records.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.errors import Mistake as Mistake
from data.text.files import Format as Format
from data.text.files import Unit as Unit
from data.text.records import BadRecord as BadRecord
from data.text.records import ReadSettings as ReadSettings
from data.text.records import Record as Record
from data.text.records import Records as Records
from data.text.streams import Stream as Stream
from model.config import ModelConfig as ModelConfig
from model.mixer_kind import LeastPiece as LeastPiece
from model.mixer_kind import MixerKind as MixerKind
from model.mixer_kind import SharedDim as SharedDim
from model.mlp_kind import MLPKind as MLPKind

if TYPE_CHECKING:
    import jax
    import optax

    from train.core.loss.token_loss import TokenLoss


@dataclass(frozen=True)
class LossKind:
    """The loss of a token.

    name: the value of `train.loss`.
    make: returns the loss (train/core/loss/token_loss.py), given the values of its keys
        (None without a section). The loss must hash by value.
    section: the dataclass of its keys, `train.parts.<name>.<key>`.
    """

    name: str
    make: "Callable[[Any], TokenLoss]"
    section: type | None = None


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer.

    name: the value of `optimizer.name`.
    make: returns the optax transformation from gradients to directions, such as
        `optax.scale_by_adam()`, given the values of its keys (None without a section).
        Learning rates, decay and groups are applied afterwards.
    section: the dataclass of its keys, `optimizer.parts.<name>.<key>`.
    """

    name: str
    make: "Callable[[Any], optax.GradientTransformation]"
    section: type | None = None


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of learning rates.

    name: the value of `schedule.name`.
    make: returns the factor on learning rates as a function of the steps after the
        warm-up, given the values of its keys (None without a section) and the number of
        steps of training.
    section: the dataclass of its keys, `schedule.parts.<name>.<key>`.
    """

    name: str
    make: "Callable[[Any, int], Callable[[jax.Array], jax.Array]]"
    section: type | None = None


@dataclass(frozen=True)
class Metric:
    """A number that each training step computes, and that is logged with the loss.

    name: its name in metrics.jsonl.
    compute: returns the scalar from the parameters before the update and the gradients,
        two trees of the same structure.
    """

    name: str
    compute: "Callable[[Any, Any], jax.Array]"
