"""Compare steps of a program on its mesh with steps of one device.

Both begin with the same weights, none of whose gradients should be zero, and get the
same packed rows of random tokens. If they differ, mesh axes are switched off one after
another to find the axis that causes the difference.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from data.batch import Batch
from model.choices import Dtype
from model.params import named
from train.config import MomentDtype
from train.core.feed import place
from train.core.optimizer.moments import decode_moments
from train.core.state import TrainState
from train.core.step import make_gradients
from train.errors import NOT_PROVED, Exit
from train.prove.divided_step import DividedStep
from train.prove.forward_order import forward_order
from train.prove.inputs import perturbed_state, random_batches
from train.resolve.mesh import Device
from train.resolve.program import ConfiguredProgram

log = logging.getLogger(__name__)
# Limits of the search for batches whose tokens are far from a tie of experts.
_NUM_ROUNDINGS = 8
_MAX_TRIES = 10
# A gradient is weak if its elements are this small relative to those of all parameters.
# Its rounding errors are those of larger numbers, which cancel each other.
_WEAK = 1e-2
_ROUNDING_ERROR = 1e-5
# The largest relative difference that rounding explains: in float32, and if gradients
# travel, or moments are stored, in fewer bits.
TOLERANCES = {
    "counts": (0.0, 0.0),
    "loss": (1e-5, 1e-3),
    "gradient": (1e-4, 3e-2),
    "metric": (1e-4, 3e-2),
    "update": (1e-2, 0.3),
    "optimizer": (1e-3, 0.1),
    "weights": (1e-3, 3e-2),
}


class Key(NamedTuple):
    """The key of a compared array: a quantity, such as the gradient, and a name."""

    quantity: str
    name: str = ""


Values = dict[Key, np.ndarray]


class ArrayDifference(NamedTuple):
    """The relative difference of an array, and the largest that is allowed."""

    key: Key
    error: float
    tolerance: float

    def __str__(self) -> str:
        """Return the difference as people read it."""
        name = " ".join(self.key).rstrip()
        return f"{name}: {self.error:.2g}, at most {self.tolerance:g}"

    def as_json(self) -> dict[str, Any]:
        """Return the values of a record. JSON has neither NaN nor infinity."""
        error = self.error if math.isfinite(self.error) else None
        return {**self.key._asdict(), "error": error, "tolerance": self.tolerance}

    @property
    def is_wrong(self) -> bool:
        """Whether the difference exceeds the tolerance, or is not a number."""
        return not self.error <= self.tolerance


class Comparison(NamedTuple):
    """A mesh compared with one device.

    differences: of every array, in the order of the forward pass.
    cause: the mesh axes without which the runs agree; see `find_cause`.
    """

    differences: list[ArrayDifference]
    cause: tuple[str, ...]

    @property
    def failures(self) -> list[ArrayDifference]:
        """The differences that exceed their tolerance."""
        return [difference for difference in self.differences if difference.is_wrong]


class Steps:
    """The jitted steps of a program."""

    def __init__(self, program: ConfiguredProgram):
        self.program = program
        self._gradients = jax.jit(
            make_gradients(
                program.model,
                program.execution,
                program.recipe,
                num_tokens=program.num_tokens,
            )
        )
        self._names = forward_order(program.config.model)

    def measure_gradients(self, state: TrainState, batches: Sequence[Batch]) -> Values:
        """Return the loss, counts and gradients of the first batch."""
        program = self.program
        params = jax.device_put(state.params, program.shardings.params)
        results = self._gradients(params, place(batches[0], program.batch))
        losses, grads, load_LE, num_targets, _ = jax.device_get(results)
        values = {Key("counts", "of targets"): num_targets, Key("loss"): losses[0]}
        for k, loss in enumerate(losses[1:], 1):
            values[Key("loss", f"of prediction module {k}")] = loss
        if load_LE is not None:
            values[Key("counts", "of experts' tokens")] = load_LE
        return values | self._by_parameter("gradient", grads)

    def measure_updates(self, state: TrainState, batches: Sequence[Batch]) -> Values:
        """Return the first batch's metrics, updates and moments, and all losses."""
        program = self.program
        initial = state.params
        values = Values()
        losses = Values()
        state = jax.device_put(state, program.shardings)
        for step, batch in enumerate(batches):
            state, metrics = program.train_step(state, place(batch, program.batch))
            jax.block_until_ready((state, metrics))  # see train/core/loop.py
            metrics = jax.device_get(metrics)
            losses[Key("loss", f"of step {step}")] = metrics.pop("loss")
            if step == 0:
                values = {Key("metric", name): x for name, x in metrics.items()}
                params = jax.device_get(state.params)
                updates = jax.tree.map(np.subtract, params, initial)
                values |= self._by_parameter("update", updates)
                moments = jax.device_get(jax.jit(decode_moments)(state.optimizer))
                values |= {Key("optimizer", name): x for name, x in named(moments)}
        weights = self._by_parameter("weights", jax.device_get(state.params))
        return values | losses | weights

    def _by_parameter(self, quantity: str, tree: Any) -> Values:
        """Return the arrays of a tree of parameters, in forward order."""
        arrays = dict(named(tree))
        return {Key(quantity, name): arrays[name] for name in self._names}


MEASURES = (Steps.measure_gradients, Steps.measure_updates)


class Reference:
    """The steps of one device.

    state, batches: what the steps of every mesh begin with.
    values: what each of `MEASURES` returns.
    no_gradient: the parameters whose gradient is zero, except for rounding errors, so
        that it proves nothing.
    is_stable: whether rounding errors choose no expert of any token.
    """

    def __init__(
        self, step: DividedStep, devices: Sequence[Device], num_steps: int = 2
    ):
        """Make weights, and batches in which experts are chosen clearly.

        Raises Exit with NOT_PROVED if every gradient is zero.
        """
        self._devices = devices
        program = step.without(step.parts).program(devices)
        steps = Steps(program)
        num_tokens = program.num_tokens or 0
        model = step.config.model
        self.state = perturbed_state(program)
        for seed in range(_MAX_TRIES):
            self.batches = random_batches(
                step.config.data, num_tokens, count=num_steps, seed=seed
            )
            self.values = [take(steps, self.state, self.batches) for take in MEASURES]
            self.is_stable = not model.expert_layers or self._is_stable(steps)
            if self.is_stable:
                break
        else:
            log.warning("Rounding errors choose experts, so that counts may differ.")
        items = self.values[0].items()
        gradients = {key.name: x for key, x in items if key.quantity == "gradient"}
        sizes = {name: _size(x) for name, x in gradients.items()}
        if not any(sizes.values()):
            raise Exit(NOT_PROVED, "Every gradient is zero, which proves nothing.")
        self._typical_size = float(np.median([*filter(None, sizes.values())]))
        noise = _ROUNDING_ERROR * self._typical_size
        self.no_gradient = tuple(name for name, size in sizes.items() if size < noise)
        # An optimizer may turn the rounding errors of an element into a whole step.
        # If two names match the end of a moment's name, the longer one is its own.
        self._is_clear = {
            key: abs(gradients[name]) >= noise
            for name in sorted(filter(sizes.get, sizes), key=len)
            for key, x in self.values[1].items()
            if f".{key.name}".endswith(f".{name}") and x.shape == gradients[name].shape
        }

    def _is_stable(self, steps: Steps) -> bool:
        """Return whether rounding errors change neither counts nor losses.

        A token whose scores of two experts are almost equal may go to either of them.
        The errors are ten times those of float32, and one of a few draws may leave a
        tie as it was, so several are tried.
        """
        rng = np.random.default_rng(0)

        def round_off(x: np.ndarray) -> np.ndarray:
            return (x * (1 + rng.normal(0, 1e-6, x.shape))).astype(x.dtype)

        for _ in range(_NUM_ROUNDINGS):
            state = self.state._replace(
                params=jax.tree.map(round_off, self.state.params)
            )
            for measure, expected in zip(MEASURES, self.values, strict=True):
                for key, value in measure(steps, state, self.batches).items():
                    is_judged = key.quantity in ("counts", "loss")
                    limit = TOLERANCES[key.quantity][0]
                    if is_judged and relative_error(value, expected[key]) > limit:
                        return False
        return True

    def compare(self, step: DividedStep) -> Comparison:
        """Compare steps on the mesh of their config with those of one device.

        The updates are compared only if the loss and the gradients agree. All mesh axes
        must have explicit sizes.
        """
        differences = list[ArrayDifference]()
        for number in range(len(MEASURES)):
            differences += self._differences(number, step)
            if any(difference.is_wrong for difference in differences):

                def differs(step: DividedStep, number: int = number) -> bool:
                    return any(d.is_wrong for d in self._differences(number, step))

                return Comparison(differences, find_cause(step, differs))
        return Comparison(differences, ())

    def _differences(self, number: int, step: DividedStep) -> list[ArrayDifference]:
        """Return the difference of each array of one of `MEASURES`."""
        config = step.config
        steps = Steps(step.program(self._devices))
        values = MEASURES[number](steps, self.state, self.batches)
        is_rounded = config.train.reduce_dtype is Dtype.bfloat16
        if MEASURES[number] is Steps.measure_updates:
            is_rounded |= config.optimizer.moment_dtype is not MomentDtype.float32
        differences = []
        for key, expected in self.values[number].items():
            floor = self._typical_size * _WEAK if key.quantity == "gradient" else 0.0
            is_clear = self._is_clear.get(key, 1)
            error = relative_error(values[key] * is_clear, expected * is_clear, floor)
            tolerance = TOLERANCES[key.quantity][is_rounded]
            differences.append(ArrayDifference(key, error, tolerance))
        return differences


def find_cause(
    step: DividedStep, differs: Callable[[DividedStep], bool]
) -> tuple[str, ...]:
    """Return the mesh axes, or the key of microbatches, that cause a difference.

    These are the parts without which the runs agree. If there are none, they are the
    parts with each of which alone the runs differ.
    """
    parts = step.parts
    if len(parts) == 1:
        return tuple(parts)
    if needed := [part for part in parts if not differs(step.without([part]))]:
        return tuple(needed)
    return tuple(p for p in parts if differs(step.without({*parts} - {p})))


def _size(x: np.ndarray) -> float:
    """Return the root of the mean square of an array's elements."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def relative_error(
    actual: np.ndarray, expected: np.ndarray, floor: float = 0.0
) -> float:
    """Return the size of the difference over the size of `expected`, or `floor`."""
    error = _size(np.subtract(actual, expected, dtype=np.float64))
    return error and error / max(_size(expected), floor, 1e-30)
