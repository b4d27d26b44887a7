"""The optimizers, and what may be added to them, as a value."""

from train.config import OptimizerName
from train.core.optimizer.adamw import ADAMW
from train.core.optimizer.parts import OptimizerParts
from train.optimizers.adafactor import ADAFACTOR
from train.optimizers.by_layer import update_layer_by_layer
from train.optimizers.groups import group_members, group_of_parameters
from train.optimizers.lion import LION
from train.optimizers.muon import MUON
from train.optimizers.qk_clip import clip_scores
from train.optimizers.transfer import fit_to_length, transfer_factors, transfer_ratios

OPTIMIZERS = OptimizerParts(
    rules={
        OptimizerName.adamw: ADAMW,
        OptimizerName.muon: MUON,
        OptimizerName.adafactor: ADAFACTOR,
        OptimizerName.lion: LION,
    },
    group_members=group_members,
    group_of_parameters=group_of_parameters,
    transfer_ratios=transfer_ratios,
    transfer_factors=transfer_factors,
    fit_to_length=fit_to_length,
    clip_scores=clip_scores,
    update_layer_by_layer=update_layer_by_layer,
)
