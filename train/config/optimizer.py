"""The optimizer and its learning-rate schedule."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

from data.config import Count, Number
from train.config.bounds import NotNegative, Positive


class OptimizerName(StrEnum):
    """The update rule. `muon` updates the matrices, and AdamW everything else.

    `adafactor` stores mean squares of rows and columns; `lion` stores only a momentum.
    """

    adamw = "adamw"
    muon = "muon"
    adafactor = "adafactor"
    lion = "lion"


class MomentDtype(StrEnum):
    """The dtype in which moments are stored; bfloat16 and int8 round stochastically.

    `int8` stores codes of levels that are closer to each other near zero
    (train/optimizer/moments.py).
    """

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, Adafactor or Lion; or Muon for the matrices with AdamW for the rest."""

    name: Annotated[
        OptimizerName,
        Doc("The update rule. muon updates the matrices, and AdamW everything else."),
    ] = OptimizerName.adamw
    learning_rate: Annotated[
        Positive,
        Doc(
            "The peak learning rate. Muon's matrices have one of their own; "
            "Adafactor's is relative to the size of the weights."
        ),
    ] = 1e-3
    weight_decay: Annotated[
        NotNegative,
        Doc("The decay of matrices and embeddings, multiplied by the learning rate."),
    ] = 0.1
    b1: Annotated[
        float,
        Ge(0),
        Lt(1),
        Doc("The decay of the mean gradient. For Lion: the weight of it in an update."),
    ] = 0.9
    b2: Annotated[
        float,
        Ge(0),
        Lt(1),
        Doc("The decay of the mean squared gradient. For Lion: of the mean gradient."),
    ] = 0.95
    epsilon: Annotated[
        float, Gt(0), Doc("It is added to the root of the mean squared gradient.")
    ] = 1e-8
    moment_dtype: Annotated[
        MomentDtype,
        Doc(
            "The dtype in which moments are stored. They are computed in float32 and "
            "rounded stochastically."
        ),
    ] = MomentDtype.float32
    clip_norm: Annotated[
        Annotated[float, Gt(0)] | None,
        Doc("Gradients are scaled down to this global norm. null disables clipping."),
    ] = 1.0
    ema_decay: Annotated[
        Annotated[float, Gt(0), Lt(1)] | None,
        Doc(
            "The decay of an average of the weights, which evaluations use. null keeps "
            "no average."
        ),
    ] = None
    offload: Annotated[
        bool, Doc("Keep moments in host memory between updates. Muon cannot.")
    ] = False
    muon_learning_rate: Annotated[
        Positive, Doc("The peak learning rate of the matrices that Muon updates.")
    ] = 0.02
    muon_momentum: Annotated[
        float, Ge(0), Lt(1), Doc("The decay of Muon's mean gradient.")
    ] = 0.95
    muon_weight_decay: Annotated[
        NotNegative,
        Doc("The decay of Muon's matrices, multiplied by Muon's learning rate."),
    ] = 0.0


class Schedule(StrEnum):
    """The shape of the learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"


@dataclass(frozen=True)
class ScheduleConfig:
    """The factor on every learning rate, as a function of the step."""

    name: Annotated[
        Schedule,
        Doc("The shape after the warm-up. wsd stays at the peak, then falls linearly."),
    ] = Schedule.cosine
    warmup_steps: Annotated[
        Number, Doc("The number of steps in which the factor rises linearly to 1.")
    ] = 100
    decay_steps: Annotated[
        Count | None,
        Doc("The number of last steps in which wsd falls. null: 30 % of all steps."),
    ] = None
    final_fraction: Annotated[
        float, Ge(0), Le(1), Doc("The factor at the end, as a fraction of the peak.")
    ] = 0.1

    def num_decay_steps(self, num_steps: int) -> int:
        """Return the number of steps in which `wsd` falls (default: 30 % of all)."""
        limit = max(1, num_steps - self.warmup_steps)
        return self.decay_steps or min(max(1, round(0.3 * num_steps)), limit)

    def decay_start(self, num_steps: int) -> int:
        """Return the step at which `wsd` starts to fall."""
        return max(self.warmup_steps, num_steps - self.num_decay_steps(num_steps))
