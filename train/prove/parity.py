"""Compare steps of a program on its mesh with steps of one device.

Both begin with the same weights, none of whose gradients should be zero, and get the
same packed rows of random tokens. If they differ, mesh axes are switched off one after
another to find the axis that causes the difference.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from data.batch import Batch
from model.choices import Dtype
from model.params import named
from train.config import Config, MomentDtype
from train.feed import place
from train.mesh import Device
from train.optimizer.moments import decode_moments
from train.program import Program, make_program
from train.prove.forward_order import forward_order
from train.prove.inputs import PADDING_IDS, perturbed_state, random_batches
from train.prove.shrink import mesh_of, parts_of, without
from train.state import TrainState
from train.step import Gradients, make_gradients

log = logging.getLogger(__name__)
_NUM_STEPS = 2
_NUM_ROUNDINGS, _MAX_TRIES = 3, 10  # to find batches in which experts are clear
# A gradient is weak if its elements are this small relative to those of all parameters.
# Its rounding errors are those of larger numbers, which cancel each other.
_WEAK, _ROUNDING_ERROR = 1e-2, 1e-5


class Key(NamedTuple):
    """The key of a compared array: a quantity, such as the gradient, and a name."""

    quantity: str
    name: str = ""

    def __str__(self) -> str:
        """Return the key as people read it."""
        return f"{self.quantity} {self.name}".rstrip()


Values = dict[Key, np.ndarray]

# The largest relative difference that rounding explains: in float32, and if gradients
# travel, or moments are stored, in fewer bits.
TOLERANCES = {
    "counts": (0.0, 0.0),
    "loss": (1e-5, 1e-3),
    "gradient": (1e-4, 3e-2),
    "metric": (1e-5, 3e-2),
    "update": (1e-2, 0.3),
    "optimizer": (1e-3, 0.1),
    "weights": (1e-3, 3e-2),
}


class Steps(NamedTuple):
    """A program, and its jitted gradients."""

    program: Program
    gradients: Callable[..., Gradients]

    @classmethod
    def of(cls, config: Config, devices: Sequence[Device]) -> "Steps":
        """Return the steps of a config on the first of the devices."""
        count = int(np.prod([*mesh_of(config).values()], dtype=int))
        num_tokens = (config.model.vocab_size or 0) - PADDING_IDS
        program = make_program(config, devices[:count], num_tokens=num_tokens)
        model, execution = program.model, program.execution
        gradients = make_gradients(
            model, execution, config.train, num_tokens=num_tokens
        )
        return cls(program, jax.jit(gradients))


Measure = Callable[[Steps, TrainState, Sequence[Batch]], Values]


class ArrayDifference(NamedTuple):
    """The relative difference of an array, and the largest that is allowed."""

    key: Key
    error: float
    tolerance: float

    def __str__(self) -> str:
        """Return the difference as people read it."""
        return f"{self.key}: {self.error:.2g}, at most {self.tolerance:g}"

    def as_json(self) -> dict[str, Any]:
        """Return the values of a record. JSON has neither NaN nor infinity."""
        error = self.error if np.isfinite(self.error) else None
        return {**self.key._asdict(), "error": error, "tolerance": self.tolerance}

    @property
    def is_wrong(self) -> bool:
        """Whether the difference exceeds the tolerance, or is not a number."""
        return not self.error <= self.tolerance


class Comparison(NamedTuple):
    """A mesh compared with one device.

    differences: of every array, in the order of the forward pass.
    cause: the mesh axes without which the runs agree; see `find_cause`.
    no_gradient: the parameters whose gradient is zero, so that it proves nothing.
    """

    differences: list[ArrayDifference]
    cause: tuple[str, ...]
    no_gradient: tuple[str, ...]

    @property
    def failures(self) -> list[ArrayDifference]:
        """The differences that exceed their tolerance."""
        return [difference for difference in self.differences if difference.is_wrong]


def compare_with_one_device(
    config: Config, devices: Sequence[Device], reference: "Reference | None" = None
) -> Comparison:
    """Compare the steps of a small config on its mesh with those of one device.

    The updates are compared only if the loss and the gradients agree.

    Args:
        config: the config; all its mesh axes have explicit sizes.
        devices: at least as many devices as the mesh has.
        reference: the steps of one device. None runs them.
    """
    reference = reference or Reference(config, devices)
    differences, cause = list[ArrayDifference](), ()
    for measure in (measure_gradients, measure_steps):

        def compare(config: Config, measure=measure) -> list[ArrayDifference]:
            steps = Steps.of(config, devices)
            values = measure(steps, reference.state, reference.batches)
            return reference.compare(values, measure, config)

        def differs(config: Config, compare=compare) -> bool:
            return any(difference.is_wrong for difference in compare(config))

        differences += compare(config)
        if any(difference.is_wrong for difference in differences):
            cause = find_cause(config, differs)
            break
    return Comparison(differences, cause, reference.no_gradient)


def find_cause(config: Config, differs: Callable[[Config], bool]) -> tuple[str, ...]:
    """Return the mesh axes, or the key of microbatches, that cause a difference.

    These are the parts without which the runs agree. If there are none, they are the
    parts with each of which alone the runs differ.
    """
    parts = parts_of(config)
    if len(parts) == 1:
        return tuple(parts)
    if needed := [part for part in parts if not differs(without(config, [part]))]:
        return tuple(needed)
    return tuple(p for p in parts if differs(without(config, {*parts} - {p})))


class Reference:
    """The steps of one device, and their initial state.

    no_gradient: the parameters whose gradient is zero, except for rounding errors.
    """

    def __init__(
        self, config: Config, devices: Sequence[Device], num_steps: int = _NUM_STEPS
    ):
        """Make weights, and batches in which experts are chosen clearly."""
        self._steps = Steps.of(without(config, parts_of(config)), devices)
        self.state = perturbed_state(self._steps.program)
        order = {name: i for i, name in enumerate(forward_order(self._steps.program))}
        self._rank = lambda key: order.get(key.name, 0)
        for seed in range(_MAX_TRIES):
            self._values = dict[Measure, Values]()
            self.batches = random_batches(config, num_steps, seed)
            if not config.model.expert_layers or self._is_stable():
                break
        else:
            log.warning("Rounding errors choose experts, so that counts may differ.")
        gradients = self.values(measure_gradients)
        sizes = {k.name: _size(v) for k, v in gradients.items() if k[0] == "gradient"}
        self._typical_size = float(np.median([*sizes.values()]))
        least_size = _ROUNDING_ERROR * self._typical_size
        self.no_gradient = tuple(k for k, size in sizes.items() if size < least_size)
        # An optimizer may turn the rounding errors into a whole step.
        self._random = [name for name in self.no_gradient if sizes[name] > 0]

    def _is_stable(self) -> bool:
        """Return whether rounding errors change neither counts nor losses.

        A token whose scores of two experts are almost equal may go to either of them.
        """
        rng = np.random.default_rng(0)

        def round_off(x: np.ndarray) -> np.ndarray:
            return (x * (1 + rng.normal(0, 1e-6, x.shape))).astype(x.dtype)

        for _ in range(_NUM_ROUNDINGS):
            params = jax.tree.map(round_off, self.state.params)
            for measure in (measure_gradients, measure_steps):
                state = self.state._replace(params=params)
                values = measure(self._steps, state, self.batches)
                for key, expected in self.values(measure).items():
                    error = relative_error(values[key], expected)
                    is_judged = key.quantity in ("counts", "loss")
                    if is_judged and error > TOLERANCES[key.quantity][0]:
                        return False
        return True

    def values(self, measure: Measure) -> Values:
        """Return what one device measures with `measure_gradients` or another."""
        if measure not in self._values:
            values = measure(self._steps, self.state, self.batches)
            groups = groupby(values, lambda key: key.quantity)
            keys = (sorted(group, key=self._rank) for _, group in groups)
            self._values[measure] = {k: values[k] for group in keys for k in group}
        return self._values[measure]

    def compare(
        self, values: Values, measure: Measure, config: Config
    ) -> list[ArrayDifference]:
        """Return the difference of each array from that of one device."""
        is_rounded = config.train.reduce_dtype is Dtype.bfloat16
        if measure is measure_steps:
            is_rounded |= config.optimizer.moment_dtype is not MomentDtype.float32
        differences = []
        for key, expected in self.values(measure).items():
            if key[0] != "gradient" and any(n in key.name for n in self._random):
                continue
            floor = self._typical_size * _WEAK if key.quantity == "gradient" else 0.0
            error = relative_error(values[key], expected, floor)
            tolerance = TOLERANCES[key.quantity][is_rounded]
            differences.append(ArrayDifference(key, error, tolerance))
        return differences


def _size(x: np.ndarray) -> float:
    """Return the root of the mean square of an array's elements."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def relative_error(
    actual: np.ndarray, expected: np.ndarray, floor: float = 0.0
) -> float:
    """Return the size of the difference over the size of `expected`, or `floor`."""
    error = _size(np.subtract(actual, expected, dtype=np.float64))
    return error and error / max(_size(expected), floor, 1e-30)


def measure_gradients(
    steps: Steps, state: TrainState, batches: Sequence[Batch]
) -> Values:
    """Return the loss, counts and gradients of the first batch."""
    program = steps.program
    params = jax.device_put(state.params, program.shardings.params)
    results = steps.gradients(params, place(batches[0], program.batch))
    losses, grads, load_LE, num_targets, _ = jax.device_get(results)
    values = {Key("counts", "of targets"): num_targets, Key("loss"): losses[0]}
    for k, loss in enumerate(losses[1:], 1):
        values[Key("loss", f"of prediction module {k}")] = loss
    if load_LE is not None:
        values[Key("counts", "of experts' tokens")] = load_LE
    return values | _by_parameter("gradient", grads)


def measure_steps(steps: Steps, state: TrainState, batches: Sequence[Batch]) -> Values:
    """Return the metrics, updates and moments of the first batch, and all losses."""
    program = steps.program
    losses, first, initial = dict[Key, Any](), dict[Key, Any](), state.params
    state = jax.device_put(state, program.shardings)
    for step, batch in enumerate(batches):
        state, metrics = program.train_step(state, place(batch, program.batch))
        jax.block_until_ready((state, metrics))  # see train/loop.py
        metrics = jax.device_get(metrics)
        losses[Key("loss", f"of step {step}")] = metrics.pop("loss")
        if step == 0:
            first = {Key("metric", name): value for name, value in metrics.items()}
            updates = jax.tree.map(np.subtract, jax.device_get(state.params), initial)
            first |= _by_parameter("update", updates)
            moments = jax.device_get(jax.jit(decode_moments)(state.optimizer))
            first |= {Key("optimizer", name): x for name, x in named(moments)}
    weights = _by_parameter("weights", jax.device_get(state.params))
    return first | losses | weights


def _by_parameter(quantity: str, tree: Any) -> Values:
    """Return the arrays of a tree of parameters by their names."""
    return {Key(quantity, name): array for name, array in named(tree)}
