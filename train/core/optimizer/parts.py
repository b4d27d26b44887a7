"""Records of the optional parts of an optimizer (train/optimizers/catalog.py)."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.config import ModelConfig
from train.config import OptimizerConfig, OptimizerName, ParameterGroup
from train.core.optimizer.factors import Factors
from train.core.optimizer.rates import ParamRates
from train.core.optimizer.update import UpdatePart


@dataclass(frozen=True)
class RuleInputs:
    """The parameters that a rule updates, and the devices that hold them.

    infos: tree of `ParamInfo`.
    rates: the rates of all parameters, by the dotted name of a parameter.
    compute_dtype: the dtype of the operands of products.
    mesh: the devices that share the work. None means one device.
    specs: tree of the parameters' PartitionSpecs on the mesh.
    """

    infos: Any
    rates: Mapping[str, ParamRates]
    compute_dtype: DTypeLike
    mesh: Mesh | None = None
    specs: Any = None


def configured_rates(config: OptimizerConfig) -> ParamRates:
    """Return the rate and the decay that the config gives to all parameters."""
    return ParamRates(config.learning_rate, config.weight_decay)


@dataclass(frozen=True)
class UpdateRule:
    """How one kind of optimizer updates parameters.

    make_transform: returns the optax transformation, which includes decays and peak
        learning rates. Checkpoints have the names in its state.
    max_direction: returns the largest entry that a direction may have if gradients are
        finite, from the config and the rates of all parameters. If it returns None,
        there is no bound, and every update is checked for overflow.
    matrix_rates: returns the rate and the decay of matrices.
    width_exponent: returns the power of 1 / width that multiplies the rates of matrices
        with `optimizer.transfer` (train/optimizers/transfer.py). 1 is right for AdamW.
    updates_by_layer: whether moments in eight bits can be updated layer by layer.
    checks_again: whether the check for overflow computes the update a second time.
        A rule with expensive products sets it to False.
    """

    make_transform: Callable[
        [OptimizerConfig, RuleInputs], optax.GradientTransformation
    ]
    max_direction: Callable[[OptimizerConfig, Collection[ParamRates]], float | None] = (
        lambda config, rates: None
    )
    matrix_rates: Callable[[OptimizerConfig], ParamRates] = configured_rates
    width_exponent: Callable[[OptimizerConfig], float] = lambda config: 1.0
    updates_by_layer: bool = False
    checks_again: bool = True


@runtime_checkable
class LayerLoop(Protocol):
    """Updates one layer after another (train/optimizers/by_layer.py)."""

    def __call__(
        self,
        update: UpdatePart,
        grads: Any,
        moments: Any,
        params: Any,
        on_host: bool,
        in_place: bool,
    ) -> tuple[Any, Any, jax.Array]:
        """Return new parameters, new moments, and whether the update was accepted."""
        ...


@dataclass(frozen=True)
class OptimizerParts:
    """The rules of all optimizers, and what changes their rates and their updates.

    rules: the update rule of each name.
    group_members: returns the names of the parameters of each group in
        `optimizer.groups`.
    group_of_parameters: returns the group of each parameter that has one, by its name.
        Raises ConfigError if a group has no parameter.
    transfer_ratios: returns the width and the depth of a model, divided by those of the
        model whose rates are given.
    transfer_factors: returns the factors of each parameter, by its name. The last
        argument is the width exponent of the rule.
    fit_to_length: returns settings that fit a run of this many steps.
    clip_scores: maps a threshold, the bounds of all scores [L, N] and float32 weights
        to weights.
    update_layer_by_layer: runs an update in a loop over layers.
    """

    rules: Mapping[OptimizerName, UpdateRule]
    group_members: Callable[[OptimizerConfig, Any], list[list[str]]]
    group_of_parameters: Callable[[OptimizerConfig, Any], dict[str, ParameterGroup]]
    transfer_ratios: Callable[[OptimizerConfig, ModelConfig], tuple[float, float]]
    transfer_factors: Callable[
        [OptimizerConfig, ModelConfig, Any, float], dict[str, Factors]
    ]
    fit_to_length: Callable[[OptimizerConfig, int], OptimizerConfig]
    clip_scores: Callable[[ModelConfig, float, Float[Array, "L N"], Any], Any]
    update_layer_by_layer: LayerLoop
