"""The optimizer."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, assert_never

from annotated_types import Ge, Gt, Lt
from typing_extensions import Doc

from data.config import Count
from train.config.bounds import NotNegative, Positive
from train.core.choices import MomentDtype


class OptimizerName(StrEnum):
    """The update rule. `muon` updates the matrices, and AdamW everything else.

    `adafactor` stores mean squares of rows and columns; `lion` stores only a momentum.
    """

    adamw = "adamw"
    muon = "muon"
    adafactor = "adafactor"
    lion = "lion"

    @property
    def unread_keys(self) -> tuple[str, ...]:
        """Prefixes of the keys of `optimizer.*` that have no effect on this rule."""
        match self:
            case OptimizerName.adamw:
                return ("muon_",)
            case OptimizerName.muon:
                return ()
            case OptimizerName.adafactor:
                return ("muon_", "epsilon", "b1", "b2", "moment_dtype")
            case OptimizerName.lion:
                return ("muon_", "epsilon")
            case _:
                assert_never(self)


class MuonScale(StrEnum):
    """The factor on Muon's updates: see `OptimizerConfig.muon_scale`."""

    spectral = "spectral"
    rms = "rms"


class Transfer(StrEnum):
    """Whether rates are those of a smaller model: see train/optimizers/transfer.py."""

    none = "none"
    completep = "completep"


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with another learning rate or another decay."""

    match: Annotated[
        str,
        Doc("A pattern of parameter names, in which * stands for any text: *norm*."),
    ] = ""
    learning_rate: Annotated[
        NotNegative, Doc("A factor on the learning rate of these parameters.")
    ] = 1.0
    weight_decay: Annotated[
        NotNegative | None,
        Doc("Their decay, multiplied by their learning rate. null does not change it."),
    ] = None


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
    muon_scale: Annotated[
        MuonScale,
        Doc(
            "The factor on the update of a matrix of I inputs and O outputs: "
            "sqrt(max(1, O / I)) for spectral, and 0.2 sqrt(max(I, O)) for rms, which "
            "makes the entries about as large as those of AdamW's updates."
        ),
    ] = MuonScale.spectral
    muon_per_head: Annotated[
        bool,
        Doc(
            "Orthogonalize the projections to queries, keys and values separately for "
            "each head. The output projection stays one matrix."
        ),
    ] = False
    qk_clip: Annotated[
        Annotated[float, Gt(0)] | None,
        Doc(
            "After an update, heads whose attention scores exceed this value in the "
            "batch get smaller queries and keys (QK-clip). null disables clipping."
        ),
    ] = None
    transfer: Annotated[
        Transfer,
        Doc(
            "completep makes rates, decay and epsilon those of a model of base_width "
            "and base_depth: initial values and updates are scaled so that the best "
            "rates of that model fit this one."
        ),
    ] = Transfer.none
    base_width: Annotated[
        Count | None, Doc("The embed_dim of the model whose rates are given.")
    ] = None
    base_depth: Annotated[
        Count | None, Doc("The num_layers of the model whose rates are given.")
    ] = None
    base_steps: Annotated[
        Count | None,
        Doc(
            "The steps of the run whose rates are given. AdamW's rate, decay, epsilon "
            "and betas are changed so that a run of train.num_steps fits them. null "
            "changes nothing."
        ),
    ] = None
    groups: Annotated[
        list[ParameterGroup],
        Doc(
            "Parameters with another learning rate or decay. The first group whose "
            "pattern matches a parameter has it."
        ),
    ] = field(default_factory=list)
