"""One update of the weights, and the average of weights.

optax computes a direction; this module scales it by the schedule at the *step*, which a
skipped update does not hold back, and applies it. All of it is in float32, whatever the
dtype of weights and moments: what it leaves in bfloat16 or eight bits is rounded at
random, and no copy of it in float32 is kept. An average is always kept in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from model.params import Kind, is_info
from train.config import MomentDtype, OptimizerConfig, OptimizerName, ScheduleConfig
from train.optimizer.adafactor import scale_by_adafactor
from train.optimizer.by_layer import layer_by_layer
from train.optimizer.moments import Storage, unpacked
from train.optimizer.muon import muon
from train.optimizer.schedule import factor


class OptimizerState(NamedTuple):
    """optax's own state, and the average of weights (None unless asked for)."""

    transform: Any
    average: Any


@dataclass(frozen=True)
class Optimizer:
    """A direction, the factor on it, and how to take a step."""

    config: OptimizerConfig
    transform: optax.GradientTransformation
    factor: Callable[[jax.Array], jax.Array]  # the schedule, a function of the step
    storage: Storage  # how weights and moments are stored
    by_layer: bool = False  # whether layers are updated one by one
    in_place: bool = True  # as `layer_by_layer` has it

    def init(self, params: Any) -> OptimizerState:
        """Start: moments at zero, the average at the weights."""
        average = None
        if self.config.ema_decay is not None:
            average = averages(params)
        state = self.transform.init(jax.tree.map(_as_float32, params))
        if self.storage.dtype is not MomentDtype.float32:
            # Without a barrier XLA computes the result of zeros while compiling, for
            # seconds.
            state = jax.lax.optimization_barrier(state)
        return OptimizerState(self.storage.packed(state, jnp.int32(0)), average)

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Return the learning rate for the update after `step` updates."""
        return self.config.learning_rate * self.factor(step)

    def update(
        self,
        grads: Any,
        norm: jax.Array,
        state: OptimizerState,
        params: Any,
        step: Any,
        accepted: jax.Array | bool = True,
    ) -> tuple[Any, OptimizerState, jax.Array]:
        """Return the parameters and the optimizer's state after one update.

        The last result tells whether the update is accepted: it is not if it would
        write a NaN or an overflow. An update that is not accepted leaves all as it was.
        Where layers are updated one by one, each layer is checked by itself: others may
        have moved before one is refused.
        """
        factor = self.factor(step)

        def update(
            grads: Any, moments_before: Any, params: Any, layer: Any
        ) -> tuple[Any, Any, jax.Array]:
            arguments = grads, moments_before, params
            moved, moments = self._moved(*arguments, norm, factor)

            def num_spoiled(grads: Any, moments_before: Any, params: Any) -> jax.Array:
                new = moved, moments
                if self.config.name is not OptimizerName.muon:
                    new = self._moved(grads, moments_before, params, norm, factor)
                count = _num_spoiled(new[0], _float32_tree(params), jnp.square)
                return count + _num_spoiled(
                    new[1], unpacked(moments_before), _rounded_up
                )

            spoiled = jnp.float32(0)
            if may_overflow(self.config):
                # The check is a branch, so that the update compiles to the same bits as
                # without it. The branch computes the update again, which reads the
                # state again. Muon is excluded, because its products are expensive.
                spoiled = jax.lax.cond(
                    accepted, num_spoiled, lambda *_: jnp.float32(0), *arguments
                )
            fine = accepted & (spoiled == 0)
            new = self.storage.rounded(moved, params, step, layer)
            moments = self.storage.packed(moments, step, layer)
            return *_chosen(fine, (new, moments), (params, moments_before)), fine

        if self.by_layer:
            in_loop = self.config.offload, self.in_place
            trees = grads, state.transform, params
            params, moments, accepted = layer_by_layer(update, *trees, *in_loop)
        else:
            params, moments, accepted = update(grads, state.transform, params, 0)
        average, decay = state.average, self.config.ema_decay
        if decay is not None:
            moved = jax.tree.map(
                lambda a, p: decay * a + (1 - decay) * _as_float32(p), average, params
            )
            average = _chosen(accepted, moved, average)
        return params, OptimizerState(moments, average), accepted

    def _moved(
        self,
        grads: Any,
        moments_before: Any,
        params: Any,
        norm: jax.Array,
        factor: jax.Array,
    ) -> tuple[Any, Any]:
        """Return float32 weights and moments after an update."""
        if self.config.clip_norm is not None:
            scale = jnp.minimum(1.0, self.config.clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        grads, weights = _float32_tree(grads), _float32_tree(params)
        moments = unpacked(moments_before)
        directions, moments = self.transform.update(grads, moments, weights)
        moved = jax.tree.map(lambda w, d: w - factor * d, weights, directions)
        return moved, moments


def _float32_tree(tree: Any) -> Any:
    return jax.tree.map(_as_float32, tree)


def _rounded_up(x: jax.Array) -> jax.Array:
    return 1.01 * x  # more than what rounding to bfloat16 adds


def _num_spoiled(
    new: Any, old: Any, use: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Count the entries of a tree that are of no use any more.

    Args:
        new: what is to be written, before it is rounded.
        old: what it replaces.
        use: what must be finite of an entry: of a weight its square, for norms.
    """

    def count(new: jax.Array, old: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.floating):
            return jnp.float32(0)
        spoiled = jnp.isfinite(use(old)) & ~jnp.isfinite(use(new))
        return jnp.sum(spoiled, dtype=jnp.float32)

    return jnp.asarray(optax.tree.sum(jax.tree.map(count, new, old)))


def _chosen(accepted: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)


def may_overflow(config: OptimizerConfig) -> bool:
    """Return whether an update by finite gradients may exceed the range of float32.

    The check of an update reads the whole state again. It is left out if no entry
    moves by more than 1e12, and decay shrinks weights: then 10 million steps stay below
    1e19, whose square overflows. The mean of clipped gradients is at most clip_norm, so
    that Adam's direction is at most clip_norm / ((1 - b1) epsilon), whatever the mean
    square is. Lion's direction is at most 1, and that of Muon below the root of a dim.
    """
    groups = [(config.learning_rate, config.weight_decay)]
    match config.name:
        case OptimizerName.lion:
            reach = 1.0
        case OptimizerName.adafactor:
            return True
        case OptimizerName.adamw | OptimizerName.muon:
            if config.clip_norm is None:
                return True
            reach = max(1e6, config.clip_norm / ((1 - config.b1) * config.epsilon))
            if config.name is OptimizerName.muon:
                groups.append((config.muon_learning_rate, config.muon_weight_decay))
        case _:
            assert_never(config.name)
    return any(rate * reach > 1e12 or rate * decay > 1 for rate, decay in groups)


def averages(params: Any) -> Any:
    """Return averages that start at the weights, in float32.

    Copies: parameters and averages are both donated to the step.
    """
    return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)


def _as_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def make_optimizer(
    config: OptimizerConfig,
    schedule: ScheduleConfig,
    num_steps: int,
    infos: Any,
    compute: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    specs: Any = None,
    seed: int = 0,
    platform: str = "cpu",
) -> Optimizer:
    """Build the optimizer.

    Args:
        config: which, and its rates.
        schedule: the factor on the rates.
        num_steps: the schedule's length.
        infos: tree of `ParamInfo`.
        compute: dtype of the operands of Muon's products.
        mesh: whose devices share Muon's work.
        specs: tree of the parameters' PartitionSpecs on it.
        seed: of random rounding.
        platform: that it runs on.
    """
    decayed = jax.tree.map(
        lambda info: info.kind is not Kind.vector, infos, is_leaf=is_info
    )
    match config.name:
        case OptimizerName.adafactor:
            direction = scale_by_adafactor(infos)
        case OptimizerName.lion:
            direction = optax.scale_by_lion(config.b1, config.b2)
        case OptimizerName.adamw | OptimizerName.muon:  # Muon's vectors use AdamW
            direction = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
        case _:
            assert_never(config.name)
    transform = optax.chain(
        direction,
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale(config.learning_rate),
    )
    if config.name is OptimizerName.muon:
        labels = jax.tree.map(
            lambda info: "muon" if info.kind is Kind.matrix else "adamw",
            infos,
            is_leaf=is_info,
        )
        matrices = muon(config, infos, compute, mesh, specs)
        transform = optax.partition({"muon": matrices, "adamw": transform}, labels)
    storage = Storage(config.moment_dtype, infos, seed)
    parts = transform, factor(schedule, num_steps), storage
    # Ahead of time XLA:GPU is not told which arguments lie in host memory.
    in_place = not (config.offload and platform == "gpu")
    return Optimizer(config, *parts, _by_layer(config, platform, mesh), in_place)


def _by_layer(config: OptimizerConfig, platform: str, mesh: Mesh | None) -> bool:
    """Choose whether layers are updated one by one.

    XLA:GPU holds moments of eight bits of all layers at once in float32. Muon's
    matrices travel together, Adafactor has no moments of eight bits, and stages of a
    pipeline have other layers each.
    """
    staged = mesh is not None and mesh.shape["pipeline"] > 1
    in_eight = config.moment_dtype is MomentDtype.int8
    elementwise = (
        config.name in (OptimizerName.adamw, OptimizerName.lion) and not staged
    )
    return config.offload or (platform == "gpu" and in_eight and elementwise)
