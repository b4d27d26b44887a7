"""Make the optimizer that a config describes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from model.params import Kind, is_info
from train.config import MomentDtype, OptimizerConfig, OptimizerName, ScheduleConfig
from train.core.optimizer.factors import Factors
from train.core.optimizer.moments import MomentStorage
from train.core.optimizer.schedule import make_schedule
from train.core.optimizer.update import Optimizer
from train.optimizers.adafactor import scale_by_adafactor
from train.optimizers.by_layer import update_layer_by_layer
from train.optimizers.groups import (
    ParamRates,
    add_decay,
    parameter_rates,
    scale_by_rate,
    with_epsilons,
)
from train.optimizers.muon import muon
from train.optimizers.overflow import may_overflow
from train.optimizers.transfer import fit_to_length


def make_optimizer(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    num_steps: int,
    infos: Any,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    specs: Any = None,
    seed: int = 0,
    platform: str = "cpu",
    factors: Mapping[str, Factors] | None = None,
    rate_factor: float = 1.0,
    clip_scores: Callable[[Any, Any], Any] | None = None,
) -> Optimizer:
    """Build the optimizer.

    Args:
        config: the kind of optimizer, and its rates.
        schedule: the schedule of learning rates.
        num_steps: the length of the schedule.
        infos: tree of `ParamInfo`.
        compute_dtype: the dtype of the operands of Muon's products.
        mesh: the devices that share Muon's work.
        specs: tree of the parameters' PartitionSpecs on the mesh.
        seed: the seed of stochastic rounding.
        platform: the platform of the devices.
        factors: those of `transfer_factors`.
        rate_factor: a factor on all learning rates, in addition to the schedule.
        clip_scores: `Optimizer.clip_scores`.

    Raises:
        ConfigError: a group of `optimizer.groups` has no parameter.
    """
    config = fit_to_length(config, num_steps)
    factors = factors or {}
    rates = parameter_rates(config, infos, factors)
    transform = _make_transform(config, infos, rates)
    if config.name is OptimizerName.muon:  # Adam updates all but matrices
        labels = jax.tree.map(
            lambda info: "muon" if info.kind is Kind.matrix else "adamw",
            infos,
            is_leaf=is_info,
        )
        muon_part = optax.chain(
            *muon(config, infos, compute_dtype=compute_dtype, mesh=mesh, specs=specs),
            add_decay(rates, optax.EmptyState()),
            scale_by_rate(rates),
        )
        transform = optax.partition({"muon": muon_part, "adamw": transform}, labels)
    update_layers = None
    if _needs_loop(config, platform, mesh):
        update_layers = partial(
            update_layer_by_layer,
            on_host=config.offload,
            # Compiling ahead of time, XLA:GPU does not learn which arguments are in
            # host memory, and refuses to update moments there in place.
            in_place=not (config.offload and platform == "gpu"),
        )
    return Optimizer(
        transform,
        make_schedule(schedule, num_steps, rate_factor),
        MomentStorage(config.moment_dtype, infos, seed),
        learning_rate_peak=config.learning_rate,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
        checks_overflow=may_overflow(config, rates.values()),
        # Products of Muon are too expensive to compute twice.
        checks_again=config.name is not OptimizerName.muon,
        factors=factors,
        update_layers=update_layers,
        clip_scores=clip_scores,
    )


def _make_transform(
    config: OptimizerConfig, infos: Any, rates: Mapping[str, ParamRates]
) -> optax.GradientTransformation:
    """Return the update of parameters that are not Muon's, without the schedule."""
    match config.name:
        case OptimizerName.adafactor:
            direction = scale_by_adafactor(infos)
        case OptimizerName.lion:
            direction = optax.scale_by_lion(config.b1, config.b2)
        case OptimizerName.adamw | OptimizerName.muon:
            direction = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
            direction = with_epsilons(direction, rates)
        case _:
            assert_never(config.name)
    return optax.chain(
        direction,
        add_decay(rates, optax.MaskedState(optax.EmptyState())),
        scale_by_rate(rates),
    )


def _needs_loop(config: OptimizerConfig, platform: str, mesh: Mesh | None) -> bool:
    """Return whether layers must be updated one by one, in a loop.

    Offloaded moments need the loop. So do eight-bit moments on a GPU, because XLA would
    hold the moments of all layers in float32 at once. The exceptions are Muon, which
    exchanges all matrices together, Adafactor, which has no eight-bit moments, and
    pipelines, whose stages hold different layers.
    """
    if config.offload:
        return True
    if config.qk_clip is not None:  # It changes the weights of all layers together.
        return False
    is_pipelined = mesh is not None and mesh.shape["pipeline"] > 1
    is_separable = config.name in (OptimizerName.adamw, OptimizerName.lion)
    has_eight_bits = config.moment_dtype is MomentDtype.int8
    return platform == "gpu" and has_eight_bits and is_separable and not is_pipelined
