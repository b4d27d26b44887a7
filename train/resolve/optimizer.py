"""Make the optimizer that a config describes, from the parts that are handed in."""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from model.config import ModelConfig
from train.config import MomentDtype, OptimizerConfig, ScheduleConfig
from train.core.optimizer.moments import MomentStorage
from train.core.optimizer.parts import OptimizerParts, RuleInputs, UpdateRule
from train.core.optimizer.rates import ParamRates, parameter_rates, with_rates
from train.core.optimizer.schedule import make_schedule
from train.core.optimizer.update import Optimizer
from train.own_parts import chosen_part


def make_optimizer(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    num_steps: int,
    *,
    parts: OptimizerParts,
    model: ModelConfig,
    infos: Any,
    compute_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    specs: Any = None,
    seed: int = 0,
    platform: str = "cpu",
    rate_factor: float = 1.0,
) -> Optimizer:
    """Build the optimizer.

    Args:
        config: the kind of optimizer, and its rates.
        schedule: the schedule of learning rates.
        num_steps: the length of the schedule.
        parts: the rules of all optimizers (train/optimizers/catalog.py).
        model: the model. Transfer reads its width and depth, and QK-clip its heads.
        infos: tree of `ParamInfo`.
        compute_dtype: the dtype of the operands of Muon's products.
        mesh: the devices that share Muon's work.
        specs: tree of the parameters' PartitionSpecs on the mesh.
        seed: the seed of stochastic rounding.
        platform: the platform of the devices.
        rate_factor: a factor on all learning rates, in addition to the schedule.

    Raises:
        ConfigError: a group of `optimizer.groups` has no parameter.
    """
    if (own := chosen_part(config, "name")) is None:
        rule = parts.rules[config.name]
    else:
        direction = own.part.make(own.values)
        rule = UpdateRule(lambda _, inputs: with_rates(direction, inputs.rates))
    config = parts.fit_to_length(config, num_steps)
    factors = parts.transfer_factors(config, model, infos, rule.width_exponent(config))
    rates = parameter_rates(
        config,
        infos,
        matrix_rates=rule.matrix_rates(config),
        groups=parts.group_of_parameters(config, infos),
        factors=factors,
    )
    clip_scores = None
    if config.qk_clip is not None:
        clip_scores = partial(parts.clip_scores, model, config.qk_clip)
    update_layers = None
    if _needs_loop(config, rule, platform, mesh):
        update_layers = partial(
            parts.update_layer_by_layer,
            on_host=config.offload,
            # Compiling ahead of time, XLA:GPU does not learn which arguments are in
            # host memory, and refuses to update moments there in place.
            in_place=not (config.offload and platform == "gpu"),
        )
    return Optimizer(
        rule.make_transform(
            config, RuleInputs(infos, rates, compute_dtype, mesh, specs)
        ),
        make_schedule(schedule, num_steps, rate_factor),
        MomentStorage(config.moment_dtype, infos, seed),
        learning_rate_peak=config.learning_rate,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
        checks_overflow=_may_overflow(
            rule.max_direction(config, rates.values()), rates.values()
        ),
        checks_again=rule.checks_again,
        factors=factors,
        update_layers=update_layers,
        clip_scores=clip_scores,
    )


def _may_overflow(max_direction: float | None, rates: Collection[ParamRates]) -> bool:
    """Return whether finite gradients may lead to weights that overflow float32.

    Updates that cannot overflow are not checked, because a check reads the whole state.
    Overflow is impossible if no step moves an entry by more than 1e12 and decay shrinks
    weights: then weights stay below 1e19 for 10 million steps, and their squares are
    finite. `rates` are those of all parameters.
    """
    if max_direction is None:
        return True
    return any(
        own.learning_rate * max_direction > 1e12
        or own.learning_rate * own.weight_decay > 1
        for own in rates
    )


def _needs_loop(
    config: OptimizerConfig, rule: UpdateRule, platform: str, mesh: Mesh | None
) -> bool:
    """Return whether layers must be updated one by one, in a loop.

    Offloaded moments need the loop. So do eight-bit moments on a GPU, because XLA would
    hold the moments of all layers in float32 at once. The exceptions are rules that
    cannot update layers one by one, and pipelines, whose stages hold different layers.
    """
    if config.offload:
        return True
    if config.qk_clip is not None:  # It changes the weights of all layers together.
        return False
    is_pipelined = mesh is not None and mesh.shape["pipeline"] > 1
    has_eight_bits = config.moment_dtype is MomentDtype.int8
    is_split = rule.updates_by_layer and not is_pipelined
    return platform == "gpu" and has_eight_bits and is_split
