"""Compare the contents of a checkpoint with the state to restore.

From one start to the next a run may begin or cease to keep an average of weights or
recent steps, keep its moments in another format, or pad its vocabulary. All else must
be as it was saved.
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
    """Return what to load for a state, without the parts that have to be initialised.

    Args:
        saved: shapes and dtypes of the saved arrays, by name.
        like: `jax.ShapeDtypeStruct` leaves with shardings.

    Raises:
        ConfigError: naming an array that is wanted and was not saved, or the other way
            round, or has another shape.
    """
    optimizer = {"transform": like.optimizer.transform}
    wanted = {"step": like.step, "params": like.params, "optimizer": optimizer}
    wanted = in_saved_format(wanted, saved)
    if _has_average(saved, like):
        wanted["optimizer"]["average"] = like.optimizer.average
    if like.recent is not None:
        before = saved.get("recent.values")
        if before is not None and before.shape == like.recent.values.shape:
            wanted["recent"] = like.recent
    _check(saved, wanted, {name for name in saved if not name.startswith(_MAY_CEASE)})
    return wanted


def best_to_load(saved: Mapping[str, Any], like: TrainState) -> dict[str, Any]:
    """Return what to load to evaluate: the average of weights if kept, else weights.

    Raises:
        ConfigError: as `to_load`, of these alone.
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
    """Check that what is wanted was saved, in its shape, and that all needed is wanted.

    Weights come first: moments follow them.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in named(wanted)}
    names = sorted(shapes.keys() | needed, reverse=True)
    for name in names:
        if name not in saved:
            raise _misfit(name, "was not saved")
        before = tuple(saved[name].shape)
        if name not in shapes:
            raise _misfit(name, "was saved, and has no place")
        if not fits_padded(before, shapes[name]):
            wanted_shape = f"{shapes[name]} is wanted"
            raise _misfit(name, f"was saved with the shape {before}, {wanted_shape}")


def fits_padded(before: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a shape is the one that was saved, but for padding.

    Runs of before vocabularies were padded hold tables of 50,257 rows, say, where
    50,304 are wanted: a dim may grow to the next multiple of 128, with zeros.
    """
    return len(before) == len(shape) and all(
        dim in (own, -(-own // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
        for dim, own in zip(shape, before, strict=True)
    )


def _misfit(name: str, what: str) -> ConfigError:
    """Name the part of the config of which an array follows that is another now."""
    key, remedy = "model", "start another run.name"
    if name.startswith("optimizer.transform."):
        key, remedy = "optimizer.name", f"{remedy} with init_from=<this run>"
    rule = f"is another than that of the checkpoint: {name} {what}; take it back, or "
    return ConfigError([Mistake(key, "", rule + remedy)])
