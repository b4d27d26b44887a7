"""Records of parts that users add, and what they are made of, without JAX.

Those of mixers, MLPs and formats of text are the records of this program's own parts.
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
    make: returns the loss (train/core/loss/token_loss.py), which is hashed by its
        values, from the values of the part's keys.
    section: the dataclass of its keys, `train.parts.<name>.<key>`.
    """

    name: str
    make: "Callable[[Any], TokenLoss]"
    section: type | None = None


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer.

    name: the value of `optimizer.name`.
    make: returns the optax transformation from gradients to directions, as
        `optax.scale_by_adam` is one, from the values of the part's keys. Learning
        rates, decay and groups are applied afterwards.
    section: the dataclass of its keys, `optimizer.parts.<name>.<key>`.
    """

    name: str
    make: "Callable[[Any], optax.GradientTransformation]"
    section: type | None = None


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of learning rates.

    name: the value of `schedule.name`.
    make: returns the factor on learning rates after the warm-up, as a function of the
        step, from the values of the part's keys and the number of steps.
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
