"""Rates and initial values that fit a large model if they fit a small one.

With `optimizer.transfer=completep`, rates, decay and epsilon are those of a model that
is `base_width` wide and `base_depth` deep. Let m and l be the model's width and depth,
divided by these. A parameter then has these factors:

                                     initial std    rate       Adam's epsilon
    matrix                           m^-1/2         1/m        1/(m l)
    matrix that ends a branch        m^-1/2 / l     1/(m l)    1/m
    norm or bias that ends a branch  1/l            1/l        1/m
    other vector of a layer          1              1          1/(m l)
    table, last norm                 1              1          1/m
    head, or last norm if tied       1/m            1/m        1

Decays have the inverse of the rate's factor, so a step shrinks weights by as much. A
branch is what a layer adds to the residual stream. The block of a prediction module
counts as a layer; the projection before it is in no branch, so its epsilon has 1/m.
The source multiplies branches by 1/l and logits by 1/m. Factors on what ends a branch,
and on the head, compute the same function after every update. So the forward pass and
exported weights need no factors.
Muon's update with `muon_scale=spectral` already fits all widths, so its matrices have
rates without 1/m. With `rms` it grows by m^1/2, so their rates have m^-1/2 instead. The
width of heads must not change, and all inner widths must grow with `embed_dim`.

Source: Dey et al., arXiv:2505.01618 (CompleteP with alpha = 1), table 1;
arXiv:2512.22382, which also has the rule for the number of steps.
"""

import re
from dataclasses import replace
from typing import Any

from model.choices import Init, NormPlacement
from model.config import ModelConfig
from model.params import Kind, ParamInfo, is_info, named
from train.config import OptimizerConfig, Transfer
from train.core.optimizer.factors import Factors

_MODULE_BLOCK = re.compile(r"predict_ahead\.\d+\.block\.")


def transfer_ratios(config: OptimizerConfig, model: ModelConfig) -> tuple[float, float]:
    """Return the model's width and depth, divided by those of the base."""
    width = config.base_width
    depth = config.base_depth
    assert width is not None, "train/cli/optimizer_rules.py requires it"
    assert depth is not None, "train/cli/optimizer_rules.py requires it"
    return model.embed_dim / width, model.num_layers / depth


def transfer_factors(
    config: OptimizerConfig, model: ModelConfig, infos: Any, width_exponent: float
) -> dict[str, Factors]:
    """Return the factors of each parameter by its dotted name; {} without transfer.

    Rates of matrices are multiplied by 1 / width to the power `width_exponent`, which
    the optimizer's rule states.
    """
    if config.transfer is Transfer.none:
        return {}
    width, depth = transfer_ratios(config, model)
    # Prediction modules have a last norm of their own before the same head.
    last = r"(predict_ahead\.\d+\.)?norm\." if model.tied_head else r"head\."
    factors = dict[str, Factors]()
    for name, info in named(infos, is_info):
        in_layer = info.stacked or _MODULE_BLOCK.match(name) is not None
        initial = 1.0
        rate = 1.0
        epsilon = 1 / width
        if info.kind is Kind.matrix:
            initial = width**-0.5 if model.init is Init.gpt2 else 1.0
            rate = width**-width_exponent
        if re.match(last, name):
            # The std of `scaled` already has m^-1/2.
            has_width = info.kind is Kind.table and model.init is not Init.gpt2
            initial = width**-0.5 if has_width else 1 / width
            rate = 1 / width
            epsilon = 1.0
        elif in_layer and _ends_branch(name, info, model):
            # The std of a matrix already has l^-1/2.
            initial *= depth**-0.5 if info.kind is Kind.matrix else 1 / depth
            rate /= depth
        elif in_layer:
            epsilon /= depth
        factors[name] = Factors(initial, rate, epsilon)
    return factors


def _ends_branch(name: str, info: ParamInfo, model: ModelConfig) -> bool:
    """Return whether a layer adds this parameter's result to the residual stream."""
    *_, owner, _ = name.split(".")
    writes_stream = info.axes[-1] == "embed"
    if info.kind is Kind.matrix:
        writes_stream &= info.output_start < len(info.axes)
    if owner.endswith("norm"):
        return writes_stream and owner.endswith("output_norm")
    return writes_stream and model.norm_placement is NormPlacement.before


def fit_to_length(config: OptimizerConfig, num_steps: int) -> OptimizerConfig:
    """Return AdamW's settings for a run of `num_steps` instead of `base_steps`.

    AdamW with small steps follows a stochastic differential equation. If its noise and
    its duration are to stay the same, a step of a run with fewer steps does k times as
    much (k = base_steps / num_steps): the squares of rate and decay, 1 - b1 and 1 - b2
    are multiplied by k, and the square of epsilon is divided by k. With equal tokens,
    these are the rules for a larger batch.
    """
    if config.base_steps is None:
        return config
    ratio = config.base_steps / num_steps
    return replace(
        config,
        learning_rate=config.learning_rate * ratio**0.5,
        weight_decay=config.weight_decay * ratio**0.5,
        epsilon=config.epsilon * ratio**-0.5,
        b1=1 - (1 - config.b1) * ratio,
        b2=1 - (1 - config.b2) * ratio,
    )
