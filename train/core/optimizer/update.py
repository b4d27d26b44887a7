"""One update of the weights, and the average of weights.

optax computes a direction. This module multiplies the direction by the schedule at the
*step*, and subtracts the product from the weights. The step advances even if an update
is skipped. The update is computed in float32. Weights and moments in bfloat16 or eight
bits are rounded stochastically, without a float32 copy. The average is always float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from model.params import Kind, is_info
from train.config import MomentDtype, OptimizerConfig, OptimizerName, ScheduleConfig
from train.core.optimizer.moments import MomentStorage, decode_moments
from train.core.optimizer.overflow import may_overflow, num_overflows
from train.core.optimizer.schedule import make_schedule
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
from train.optimizers.transfer import Factors, fit_to_length


class OptimizerState(NamedTuple):
    """The state of the optax transformation, and the average of weights or None."""

    transform: Any
    average: Any


@dataclass(frozen=True, eq=False)
class Optimizer:
    """Updates parameters and the optimizer's state. It is hashed by its identity.

    schedule: the factor on learning rates at a step.
    storage: the format of moments between updates.
    checks_overflow: whether an update is checked before it is written.
    factors: those of `transfer_factors`, of which the initial values need theirs.
    by_layer: whether layers are updated one by one.
    in_place: see `update_layer_by_layer`.
    """

    config: OptimizerConfig
    transform: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array]
    storage: MomentStorage
    checks_overflow: bool
    factors: Mapping[str, Factors]
    by_layer: bool = False
    in_place: bool = True

    def init(self, params: Any) -> OptimizerState:
        """Return zero moments, and averages equal to the weights."""
        average = None if self.config.ema_decay is None else averages(params)
        state = self.transform.init(jax.tree.map(_as_float32, params))
        if self.storage.dtype is not MomentDtype.float32:
            # Without the barrier, XLA spends seconds on constant folding.
            state = jax.lax.optimization_barrier(state)
        return OptimizerState(self.storage.encode(state, jnp.int32(0)), average)

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Return the learning rate for the update after `step` updates."""
        return self.config.learning_rate * self.schedule(step)

    def update(
        self,
        grads: Any,
        norm: jax.Array,
        state: OptimizerState,
        params: Any,
        step: Any,
        accepted: jax.Array | bool = True,
        clip: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, OptimizerState, jax.Array]:
        """Return new parameters, the new state, and whether the update is accepted.

        An update that would write a NaN or an infinity is not accepted. Then parameters
        and state stay unchanged. If layers are updated one by one, each is checked by
        itself, and the other layers change even if one layer is rejected. If `accepted`
        is False, no update is accepted. `norm` is the norm of all gradients. `clip`
        maps the new float32 weights to those that are stored.
        """
        factor = self.schedule(step)

        def update_part(
            grads: Any, moments: Any, params: Any, repeat: Any
        ) -> tuple[Any, Any, jax.Array]:
            new_params, new_moments, overflows = self._apply_and_check(
                grads, moments, params, norm=norm, factor=factor, accepted=accepted
            )
            if clip is not None:
                new_params = clip(new_params)
            part_accepted = accepted & (overflows == 0)
            new_params = self.storage.round_weights(new_params, params, step, repeat)
            new_moments = self.storage.encode(new_moments, step, repeat)
            new_params = _select(part_accepted, new_params, params)
            new_moments = _select(part_accepted, new_moments, moments)
            return new_params, new_moments, part_accepted

        if self.by_layer:
            params, moments, accepted = update_layer_by_layer(
                update_part,
                grads,
                state.transform,
                params,
                on_host=self.config.offload,
                in_place=self.in_place,
            )
        else:
            params, moments, accepted = update_part(grads, state.transform, params, 0)
        average, decay = state.average, self.config.ema_decay
        if decay is not None:
            new_average = jax.tree.map(
                lambda a, p: decay * a + (1 - decay) * _as_float32(p), average, params
            )
            average = _select(accepted, new_average, average)
        return params, OptimizerState(moments, average), accepted

    def _apply_and_check(
        self,
        grads: Any,
        moments: Any,
        params: Any,
        *,
        norm: jax.Array,
        factor: jax.Array,
        accepted: jax.Array | bool,
    ) -> tuple[Any, Any, jax.Array]:
        """Return float32 weights and moments after an update, and count overflows."""
        weights, new_moments = self._apply(grads, moments, params, norm, factor)
        if not self.checks_overflow:
            return weights, new_moments, jnp.float32(0)

        def count(grads: Any, moments: Any, params: Any) -> jax.Array:
            new = weights, new_moments
            if self.config.name is not OptimizerName.muon:
                new = self._apply(grads, moments, params, norm, factor)
            # Norms need finite squares of weights. Rounding adds up to 1 % to moments.
            overflows = num_overflows(new[0], _float32_tree(params), jnp.square)
            old_moments = decode_moments(moments)
            return overflows + num_overflows(new[1], old_moments, lambda x: 1.01 * x)

        # In a branch, the check does not change how XLA compiles the written values, so
        # their bits stay the same. The branch reads the state again and computes the
        # update again, except for Muon, whose products are expensive.
        overflows = jax.lax.cond(
            accepted, count, lambda *_: jnp.float32(0), grads, moments, params
        )
        return weights, new_moments, overflows

    def _apply(
        self, grads: Any, moments: Any, params: Any, norm: jax.Array, factor: jax.Array
    ) -> tuple[Any, Any]:
        """Return float32 weights and moments after an update."""
        if self.config.clip_norm is not None:
            scale = jnp.minimum(1.0, self.config.clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        grads, weights = _float32_tree(grads), _float32_tree(params)
        directions, moments = self.transform.update(
            grads, decode_moments(moments), weights
        )
        weights = jax.tree.map(lambda w, d: w - factor * d, weights, directions)
        return weights, moments


def _as_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _float32_tree(tree: Any) -> Any:
    return jax.tree.map(_as_float32, tree)


def _select(accepted: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)


def averages(params: Any) -> Any:
    """Return averages equal to the weights, in float32.

    Copies are needed, because parameters and averages are both donated to the step.
    """
    return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)


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

    Raises:
        ConfigError: a group of `optimizer.groups` has no parameter.
    """
    config, factors = fit_to_length(config, num_steps), factors or {}
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
    return Optimizer(
        config,
        transform,
        make_schedule(schedule, num_steps, rate_factor),
        MomentStorage(config.moment_dtype, infos, seed),
        checks_overflow=may_overflow(config, rates.values()),
        factors=factors,
        by_layer=_needs_loop(config, platform, mesh),
        # Compiling ahead of time, XLA:GPU does not learn which arguments are in host
        # memory, and refuses to update moments there in place.
        in_place=not (config.offload and platform == "gpu"),
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
