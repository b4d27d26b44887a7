"""Choose the arrays of a saved step to load into a state.

Between two starts, a run may begin or cease to keep averaged weights or recent losses,
change the format of its moments, or pad its vocabulary. Everything else must have the
shape that was saved.
"""

from collections.abc import Mapping
from typing import Any

from model.config import VOCAB_MULTIPLE
from model.params import named
from train.errors import ConfigError, Mistake
from train.optimizer.moments import in_saved_format
from train.state import TrainState

_MAY_CEASE = ("optimizer.average.", "recent.")


def to_load(saved: Mapping[str, Any], like: TrainState) -> dict[str, Any]:
    """Return the arrays to load for a state, without those that must be initialised.

    Args:
        saved: shapes and dtypes, by name.
        like: `jax.ShapeDtypeStruct` leaves with shardings.

    Raises:
        ConfigError: naming an array that is missing on either side or has another
            shape.
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
    _check(saved, wanted, {name for name in saved if not name.startswith(_MAY_CEASE)})
    return wanted


def best_to_load(saved: Mapping[str, Any], like: TrainState) -> dict[str, Any]:
    """Return the parameters to load for evaluation, averaged ones if they were saved.

    Raises:
        ConfigError: as `to_load`, for these arrays alone.
    """
    wanted: dict[str, Any] = {"params": like.params}
    if _has_average(saved, like):
        wanted = {"optimizer": {"average": like.optimizer.average}}
    _check(saved, wanted, set())
    return wanted


def _has_average(saved: Mapping[str, Any], like: TrainState) -> bool:
    wanted = like.optimizer.average is not None
    return wanted and any(name.startswith("optimizer.average.") for name in saved)


def _check(saved: Mapping[str, Any], wanted: Any, needed: set[str]) -> None:
    """Check that wanted arrays were saved in their shape, and needed ones are wanted.

    Weights are checked first, because the moments follow them.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in named(wanted)}
    names = sorted(shapes.keys() | needed, reverse=True)
    for name in names:
        if name not in saved:
            raise _misfit(name, "was not saved")
        saved_shape = tuple(saved[name].shape)
        if name not in shapes:
            raise _misfit(name, "was saved, and has no place")
        if not fits_padded(saved_shape, shapes[name]):
            problem = f"was saved as {saved_shape}, {shapes[name]} is wanted"
            raise _misfit(name, problem)


def fits_padded(saved_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a shape equals the saved one, up to padding of the vocabulary.

    Older runs saved, say, 50,257 rows instead of 50,304: a dim may grow to the next
    multiple of 128, with zeros.
    """
    return len(saved_shape) == len(shape) and all(
        dim in (saved_dim, -(-saved_dim // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
        for dim, saved_dim in zip(shape, saved_shape, strict=True)
    )


def _misfit(name: str, problem: str) -> ConfigError:
    """Return the error that names the config key from which a shape follows."""
    key, remedy = "model", "start another run.name"
    if name.startswith("optimizer.transform."):
        key, remedy = "optimizer.name", f"{remedy} with init_from=<this run>"
    rule = f"differs from the checkpoint: {name} {problem}. Take it back, or "
    return ConfigError([Mistake(key, "", rule + remedy)])
