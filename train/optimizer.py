"""AdamW and Muon, their schedules, and the average of weights.

optax computes a direction; this module scales it by the schedule at the *step*, which a
skipped update does not hold back, and applies it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from model.linear import product
from model.params import Kind, ParamInfo
from model.parts import part
from train.config import OptimizerConfig, OptimizerName, Schedule, ScheduleConfig


class OptimizerState(NamedTuple):
    """optax's own state, and the average of weights (None unless asked for)."""

    transform: Any
    average: Any


@dataclass(frozen=True)
class Optimizer:
    """A direction, the factor on it, and how to take a step."""

    config: OptimizerConfig
    transform: optax.GradientTransformation
    factor: Callable[[jax.Array], jax.Array]  # of the step

    def init(self, params: Any) -> OptimizerState:
        """Start: moments at zero, the average at the weights."""
        average = None
        if self.config.ema_decay is not None:
            # A copy: parameters and average are both donated to the step.
            average = jax.tree.map(jnp.copy, params)
        return OptimizerState(self.transform.init(params), average)

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Return AdamW's learning rate for the update after `step` updates."""
        return self.config.learning_rate * self.factor(step)

    def update(
        self, grads: Any, norm: jax.Array, state: OptimizerState, params: Any, step: Any
    ) -> tuple[Any, OptimizerState]:
        """Return the parameters and the optimizer's state after one update."""
        if self.config.clip_norm is not None:
            scale = jnp.minimum(1.0, self.config.clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        directions, transform = self.transform.update(grads, state.transform, params)
        factor = self.factor(step)
        params = jax.tree.map(
            lambda p, d: (p - factor * d).astype(p.dtype), params, directions
        )
        average, decay = state.average, self.config.ema_decay
        if decay is not None:
            average = jax.tree.map(
                lambda a, p: decay * a + (1 - decay) * p, average, params
            )
        return params, OptimizerState(transform, average)


def make_optimizer(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    num_steps: int,
    infos: Any,
    compute: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
) -> Optimizer:
    """Build the optimizer.

    Args:
        config: which, and its rates.
        schedule: the factor on the rates.
        num_steps: the schedule's length.
        infos: tree of `ParamInfo`.
        compute: dtype of the operands of Muon's products.
        mesh: spread Muon's work over it, layer by layer.
    """
    decayed = jax.tree.map(
        lambda info: info.kind is not Kind.vector, infos, is_leaf=_info
    )
    adamw = optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale(config.learning_rate),
    )
    if config.name is OptimizerName.muon:
        labels = jax.tree.map(
            lambda info: "muon" if info.kind is Kind.matrix else "adamw",
            infos,
            is_leaf=_info,
        )
        muon = _muon(config, infos, compute, mesh)
        adamw = optax.partition({"muon": muon, "adamw": adamw}, labels)
    return Optimizer(config, adamw, factor(schedule, num_steps))


def _info(leaf: Any) -> bool:
    return isinstance(leaf, ParamInfo)


def _muon(
    config: OptimizerConfig, infos: Any, compute: DTypeLike, mesh: Mesh | None
) -> optax.GradientTransformation:
    """Momentum, orthogonalized, scaled by shape.

    Source: https://kellerjordan.github.io/posts/muon/.
    """

    def direction(update: jax.Array, info: ParamInfo) -> jax.Array:
        first = info.stacks
        split = first + info.inputs
        shape = update.shape
        fan_in, fan_out = math.prod(shape[first:split]), math.prod(shape[split:])
        scale = max(1.0, fan_out / fan_in) ** 0.5
        with part("muon"):
            stack = spread(update.reshape(-1, fan_in, fan_out), mesh)
            return scale * orthogonalize(stack, compute).reshape(shape)

    matrices = jax.tree.map(
        lambda info: info if info.kind is Kind.matrix else optax.MaskedNode(),
        infos,
        is_leaf=_info,
    )
    return optax.chain(
        optax.trace(config.muon_momentum, nesterov=True),
        optax.stateless(
            lambda updates, params: jax.tree.map(direction, updates, matrices)
        ),
        optax.add_decayed_weights(config.muon_weight_decay),
        optax.scale(config.muon_learning_rate),
    )


def spread(x_LIO: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Spread whole matrices over devices, on as many mesh axes as divide the stack.

    Else every device would orthogonalize all of them, or exchange parts at each step.
    """
    if mesh is None:
        return x_LIO
    axes, parts = [], 1
    for axis, size in mesh.shape.items():
        if size > 1 and x_LIO.shape[0] % (parts * size) == 0:
            axes.append(axis)
            parts *= size
    place = NamedSharding(mesh, PartitionSpec(tuple(axes) or None))
    return jax.lax.with_sharding_constraint(x_LIO, place)


def orthogonalize(x_LIO: jax.Array, compute: DTypeLike) -> jax.Array:
    """Bring the singular values of each matrix of a stack near 1.

    Five Newton-Schulz steps of the quintic a x + b x x'x + c x x'x x'x, each one
    batched product over the stack: the result is that of the matrices one by one.

    Args:
        x_LIO: L matrices of I inputs and O outputs, float32.
        compute: dtype of the products' operands; sums are float32.
    """
    tall = x_LIO.shape[1] > x_LIO.shape[2]
    x = x_LIO.swapaxes(1, 2) if tall else x_LIO  # the smaller dim squared is cheaper
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        xx = product("lio,ljo->lij", x, x, compute)
        mix = b * xx + c * product("lij,ljm->lim", xx, xx, compute)
        x = a * x + product("lij,ljo->lio", mix, x, compute)
    return x.swapaxes(1, 2) if tall else x


def factor(config: ScheduleConfig, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Return the schedule as a function of the step, 1 at its peak.

    Linear warm-up, then: `constant`; `cosine` down to the final fraction at num_steps;
    `wsd` level, then linear down over the last `decay_steps` (null: 30 %).
    """
    warmup, final = config.warmup_steps, config.final_fraction
    level = optax.constant_schedule(1.0)
    if config.name is Schedule.cosine:
        body = optax.cosine_decay_schedule(1.0, max(1, num_steps - warmup), final)
    elif config.name is Schedule.wsd:
        decay = config.decay_steps or max(1, round(0.3 * num_steps))
        down = optax.linear_schedule(1.0, final, decay)
        body = optax.join_schedules([level, down], [max(0, num_steps - decay - warmup)])
    else:
        body = level
    # The first update, at step 0, already moves: (step + 1) / warmup.
    return lambda step: jnp.where(
        step < warmup, (step + 1) / max(1, warmup), body(jnp.maximum(step - warmup, 0))
    )
