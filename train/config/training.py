"""The training loop and the training step."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from data.config import Count, Number
from model.choices import Dtype, Intermediate, OffloadName
from train.config.bounds import NotNegative


class Remat(StrEnum):
    """What the backward pass recomputes: nothing, all but matrix products, or all."""

    none = "none"
    dots = "dots"
    full = "full"


@dataclass(frozen=True)
class TrainConfig:
    """The training loop and the training step."""

    num_steps: Annotated[
        Count, Doc("The number of updates in the whole run, and the schedule's length.")
    ] = 1600
    accumulation_steps: Annotated[
        Count,
        Doc(
            "The number of microbatches in a step. An evaluation divides its batches "
            "the same way."
        ),
    ] = 1
    pipeline_microbatches: Annotated[
        Count | None,
        Doc(
            "The number of parts of a microbatch, which pass through the stages of "
            "mesh.pipeline one after another. null: the number of stages."
        ),
    ] = None
    max_skipped_steps: Annotated[
        Number,
        Doc(
            "The run ends with exit code 3 if more updates than this are skipped in a "
            "row."
        ),
    ] = 10
    skip_sigma: Annotated[
        Annotated[float, Gt(0)] | None,
        Doc(
            "Skip updates whose loss or gradient norm is this many standard deviations "
            "above the recent ones. null skips none of them."
        ),
    ] = None
    skip_window: Annotated[
        int, Ge(4), Le(2**16), Doc("The number of steps that count as recent.")
    ] = 128
    replica_check_interval_steps: Annotated[
        Count | None,
        Doc(
            "The number of steps between comparisons of the replicas of the state. "
            "null never compares them."
        ),
    ] = 500
    remat: Annotated[
        Remat | tuple[Intermediate, ...],
        Doc(
            "What the backward pass recomputes of each layer, or a list of the results "
            "that are saved and not recomputed."
        ),
    ] = Remat.none
    offload: Annotated[
        tuple[OffloadName, ...],
        Doc(
            "A list of the results of each layer that wait for the backward pass in "
            "host memory. residual is the input of the layer."
        ),
    ] = ()
    reduce_dtype: Annotated[
        Dtype,
        Doc(
            "The dtype in which gradients of matrices and tables travel between "
            "devices. auto: model.compute_dtype, except bfloat16 if that has eight "
            "bits, and float32 between the devices of a CPU."
        ),
    ] = Dtype.auto
    loss_chunk_tokens: Annotated[
        Count | None,
        Doc(
            "The largest number of positions of a row, or of a device's part of a row, "
            "whose logits exist at once. null: all positions if the vocabulary has "
            "fewer than 8,192 ids, otherwise at most 128. On TPUs, instead of 128, as "
            "many as memory allows, or all positions but only some ids at a time."
        ),
    ] = None
    predict_ahead_weight: Annotated[
        NotNegative,
        Doc(
            "The weight of the mean loss of the modules of model.predict_ahead, in "
            "nats per target."
        ),
    ] = 0.3
    predict_ahead_later_weight: Annotated[
        NotNegative | None,
        Doc(
            "The weight from the step train.predict_ahead_later_step on. null: "
            "train.predict_ahead_weight."
        ),
    ] = None
    predict_ahead_later_step: Annotated[
        Number, Doc("The first step with train.predict_ahead_later_weight.")
    ] = 0
    z_loss: Annotated[
        NotNegative, Doc("The weight of the squared logarithm of the softmax's sum.")
    ] = 0.0
