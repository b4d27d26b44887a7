"""Choose the arrays of a saved step to load into a state.

Between two starts, a run may begin or cease to keep averaged weights or recent losses,
or change the format of optimizer moments. Every other array must have the shape that
was saved.
"""

from collections.abc import Mapping
from typing import Any

from data.errors import Mistake
from model.params import named
from train.core.optimizer.moments import in_saved_format
from train.core.state import TrainState
from train.errors import ConfigError

_OPTIONAL = ("optimizer.average.", "recent.")


def arrays_to_load(saved: Mapping[str, Any], like: TrainState) -> dict[str, Any]:
    """Return the arrays to load into a state, as a tree of `jax.ShapeDtypeStruct`.

    Arrays in _OPTIONAL that were not saved are left out; the caller initialises them.

    Args:
        saved: shapes and dtypes of the saved arrays, by name.
        like: the state to fill: `jax.ShapeDtypeStruct` leaves with shardings.

    Raises:
        ConfigError: an array was not saved, is not in the state, or has another shape;
            the message names it.
    """
    optimizer = {"transform": like.optimizer.transform}
    wanted = {"step": like.step, "params": like.params, "optimizer": optimizer}
    wanted = in_saved_format(wanted, saved)
    if _has_average(saved, like):
        wanted["optimizer"]["average"] = like.optimizer.average
    if like.recent is not None:
        saved_values = saved.get("recent.values")
        if saved_values is not None and saved_values.shape == like.recent.values.shape:
            wanted["recent"] = like.recent
    _check(saved, wanted, {name for name in saved if not name.startswith(_OPTIONAL)})
    return wanted


def params_to_load(saved: Mapping[str, Any], like: TrainState) -> dict[str, Any]:
    """Return the parameters to load for evaluation: averages if saved and in `like`.

    Raises:
        ConfigError: as for `arrays_to_load`, but only for the parameters.
    """
    wanted: dict[str, Any] = {"params": like.params}
    if _has_average(saved, like):
        wanted = {"optimizer": {"average": like.optimizer.average}}
    _check(saved, wanted, set())
    return wanted


def _has_average(saved: Mapping[str, Any], like: TrainState) -> bool:
    is_wanted = like.optimizer.average is not None
    return is_wanted and any(name.startswith("optimizer.average.") for name in saved)


def _check(saved: Mapping[str, Any], wanted: Any, required: set[str]) -> None:
    """Check that wanted arrays were saved in their shapes, and required are wanted.

    A wrong parameter is reported before its moments, which have the same shape.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in named(wanted)}
    names = sorted(shapes.keys() | required, reverse=True)
    for name in names:
        if name not in saved:
            raise _misfit(name, "was not saved")
        saved_shape = tuple(saved[name].shape)
        if name not in shapes:
            raise _misfit(name, "was saved, but this config has no such array")
        if saved_shape != shapes[name]:
            problem = f"was saved as {saved_shape}, {shapes[name]} is wanted"
            raise _misfit(name, problem)


def _misfit(name: str, problem: str) -> ConfigError:
    """Return the error for an array; the error names the key that sets its shape."""
    key = "model"
    remedy = "start another run.name"
    if name.startswith("optimizer.transform."):
        key = "optimizer.name"
        remedy = f"{remedy} with init_from=<this run>"
    rule = f"differs from the checkpoint: {name} {problem}. Take it back, or "
    return ConfigError([Mistake(key, "", rule + remedy)])
