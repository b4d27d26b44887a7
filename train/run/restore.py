"""Restore the newest checkpoint whose files match their digests.

Each step that is saved has a folder, whose name is its number. If a saved step is
damaged, has another number than its folder, or belongs to another run, it is moved to
the folder `quarantine`, never deleted, and an error is logged. It is sealed when its
digests are written (digests.py). If its process died before that, it is used only if no
sealed step is left. If checkpoints exist but none can be used, DataError is raised: a
run never silently starts over.
"""

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from data.errors import DataError, Mistake
from data.storage import move_folder
from model.params import named
from train.core.optimizer.update import OptimizerState, averages
from train.core.state import TrainState
from train.distributed.processes import Cluster
from train.errors import ConfigError
from train.run.contents import arrays_to_load, params_to_load
from train.run.digests import (
    digests,
    misplacement,
    refusal,
    unsealed_mark,
    unsealed_steps,
    write_seal,
)
from train.run.orbax_fixes import SCORE, TARGETS, open_orbax

log = logging.getLogger(__name__)

FORMAT = 2  # the version of the saved tree of arrays
ALONE = Cluster()
Repack = Callable[[Any, jax.Array], Any] | None
_OTHER_ARRAYS = "its arrays are from another step"


class SavedSteps:
    """The steps saved under `<run_dir>/checkpoints`."""

    def __init__(
        self,
        directory: epath.Path,
        orbax: Any = None,
        cluster: Cluster = ALONE,
        run_id: str | None = None,
    ):
        """Open the folder.

        orbax: the checkpointer of the process that writes steps. None opens another
            one, with which steps are only read, and not moved.
        run_id: the run whose steps are used; None accepts those of any run.
        """
        self._directory = directory
        self._cluster = cluster
        self._run_id = run_id
        self._read_only = orbax is None
        self._orbax = orbax or open_orbax(directory)
        self._moved = False  # whether steps were moved since Orbax listed them

    def steps(self) -> list[int]:
        """List the saved steps, ascending."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def scores(self) -> dict[int, float]:
        """Return the validation losses that can be compared with the newest, by step.

        They are those of evaluations with as many targets as the newest evaluation.
        """
        # Of the dicts by step, take the one whose largest step is the newest.
        return max(self.scores_by_targets().values(), key=max, default={})

    def scores_by_targets(self) -> dict[float | None, dict[int, float]]:
        """Return the validation losses by step, by the number of targets evaluated."""
        scores = defaultdict[float | None, dict[int, float]](dict)
        for saved in self._orbax.checkpoints:
            metrics = saved.metrics or {}
            if SCORE in metrics:
                scores[metrics.get(TARGETS)][saved.step] = metrics[SCORE]
        return scores

    def best(self) -> int:
        """Return the step with the lowest validation loss of those in `scores`.

        Raises:
            ConfigError: no saved step was evaluated.
        """
        if scores := self.scores():
            return min(scores, key=lambda step: scores[step])
        message = "no checkpoint was evaluated; train with checkpoint.keep_best=true"
        raise ConfigError([Mistake("step", "best", message)])

    def restore(
        self,
        like: TrainState,
        step: int | None = None,
        at_most: int | None = None,
        repack: Repack = None,
    ) -> TrainState | None:
        """Restore the newest step whose files match their digests, or the step `step`.

        Args:
            like: `jax.ShapeDtypeStruct` leaves with the shardings to restore to,
                whatever mesh the step was saved from.
            step: restore only this step.
            at_most: restore the newest step up to this one; quarantine later ones.
            repack: converts optax's state, given the state and its step, to the moment
                format of `like`; None keeps the format that was saved.

        Returns:
            The state; None if there is no checkpoint, not even in the quarantine.

        Raises:
            DataError: no checkpoint can be used, or `step` cannot, or a step has
                another format.
            ConfigError: all steps are later than `at_most`; or `step` was not saved, or
                a step does not fit the model.
        """
        load = functools.partial(self._load, like=like, repack=repack)
        return self._load_newest_usable(load, step, at_most)

    def _load_newest_usable(
        self,
        load: Callable[[int], Any],
        step: int | None = None,
        at_most: int | None = None,
    ) -> Any:
        """Load the newest step that verifies, under the rules of `restore`."""
        try:
            return self._try_each(load, step, at_most)
        finally:
            if self._moved:  # reload only once, as Orbax reads all descriptions again
                self._moved = False
                self._orbax.reload()

    def _try_each(
        self, load: Callable[[int], Any], step: int | None, at_most: int | None
    ) -> Any:
        steps, unsealed = self._cluster.broadcast(self._list_steps)
        if step is not None:
            if step not in steps:
                listed = ", ".join(map(str, steps)) or "none yet"
                rule = f"must be a saved step; saved are: {listed}"
                raise ConfigError([Mistake("step", step, rule)])
            steps = [step]
            unsealed = []
        if at_most is not None:
            steps, unsealed = self._rewind(steps, unsealed, at_most)
        for candidate in [s for s in reversed(steps) if s not in unsealed]:
            refused = self._reason_to_refuse(candidate)
            if refused is None:
                loaded = load(candidate)
                if loaded is not None:
                    if not self._read_only:
                        # The run would otherwise not save these steps again.
                        for unsealed_step in unsealed:
                            message = "checkpoint of step %d was never hashed"
                            self._log_error(message, unsealed_step)
                            self._set_aside(unsealed_step)
                    return loaded
                refused = f"does not belong there: {_OTHER_ARRAYS}"
            self._log_error("checkpoint of step %d %s", candidate, refused)
            self._set_aside(candidate)
        if unsealed:
            return self._load_unsealed(unsealed[-1], load)
        quarantine = self._directory / "quarantine"
        if steps or (quarantine.exists() and any(quarantine.iterdir())):
            raise DataError(
                f"{self._directory}: no checkpoint verifies (tried {steps}), and the "
                f"run does not start over. Put one back (damaged ones are in "
                f"{quarantine}), or choose another run.name"
            )
        return None

    def restore_params(
        self, like: TrainState, step: int | None = None
    ) -> tuple[int, Any]:
        """Return the restored step and its parameters, which are the only arrays read.

        If both the step and `like` have averages of the parameters, these are returned
        instead.

        Raises:
            ConfigError: there is no such step, or it does not fit the model.
            DataError: the step cannot be read or has another format, or there is no
                checkpoint.
        """

        def load(step: int) -> tuple[int, Any]:
            # It has either the parameters or their averages.
            loaded = self._read(step, params_to_load, like)
            return step, loaded.get("params") or loaded["optimizer"]["average"]

        restored = self._load_newest_usable(load, step)
        if restored is None:
            raise DataError(f"{self._directory}: there is no checkpoint yet")
        return restored

    def _list_steps(self) -> tuple[list[int], list[int]]:
        """Return, on process 0, all saved steps and the unsealed steps among them."""
        steps = self.steps()
        return steps, unsealed_steps(self._directory, steps, clean=not self._read_only)

    def _rewind(
        self, steps: list[int], unsealed: list[int], at_most: int
    ) -> tuple[list[int], list[int]]:
        """Quarantine the steps after `at_most`, and return both lists without them."""
        if steps and at_most < min(steps):
            rule = f"must leave a checkpoint to go on from; there are steps {steps}"
            raise ConfigError([Mistake("run.rewind_to", at_most, rule)])
        for step in [step for step in steps if step > at_most]:
            self._set_aside(step)
        remaining = [step for step in steps if step <= at_most]
        return remaining, [step for step in unsealed if step <= at_most]

    def _reason_to_refuse(self, step: int) -> str | None:
        """Return why a step cannot be used, or None. Each process checks some files."""
        cluster = self._cluster
        folder = self._directory / str(step)
        return cluster.first_error(
            refusal(folder, cluster.process, cluster.processes, self._run_id)
        )

    def _read(
        self,
        step: int,
        choose: Callable[[dict[str, Any], TrainState], dict[str, Any]],
        like: TrainState,
    ) -> dict[str, Any]:
        """Read the arrays that `choose` selects from those of a step and `like`."""
        description = self._orbax.metadata(step)
        saved_format = (description.custom_metadata or {}).get("format", 1)
        if saved_format != FORMAT:
            raise DataError(
                f"{self._directory}/{step} has format {saved_format}, and this version "
                f"reads format {FORMAT} only. Use the version that wrote it, or start "
                f"another run.name"
            )
        wanted = choose(dict(named(description.metadata)), like)
        try:
            return self._orbax.load(step, abstract_state=wanted)
        except Exception as error:
            verified = (
                f"The files of step {step} verified, unless the log says otherwise"
            )
            error.add_note(f"{verified}: memory, disk or network failed.")
            raise

    def _load(self, step: int, like: TrainState, repack: Repack) -> TrainState | None:
        """Load a step, with a new average and recent losses if none were saved.

        Returns None if the arrays are from another step.
        """
        loaded = self._read(step, arrays_to_load, like)
        if int(loaded["step"]) != step:
            return None
        optax_state = loaded["optimizer"].get("transform")
        average = loaded["optimizer"].get("average")
        params = loaded["params"]
        recent = loaded.get("recent")
        target = like.optimizer
        if repack is not None and (
            jax.tree.structure(optax_state) != jax.tree.structure(target.transform)
        ):
            message = "the moments of step %d had another format: rounded once"
            self._log_error(message, step)
            repacked = jax.jit(repack, out_shardings=_shardings(target.transform))
            optax_state = repacked(optax_state, loaded["step"])
        if target.average is not None and average is None:
            self._log_error("step %d has no average; it starts at the weights", step)
            start_average = jax.jit(averages, out_shardings=_shardings(target.average))
            average = start_average(params)
        if like.recent is not None and recent is None:
            recent = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like.recent
            )
        optimizer = OptimizerState(optax_state, average)
        return TrainState(loaded["step"], params, optimizer, recent)

    def _load_unsealed(self, step: int, load: Callable[[int], Any]) -> Any:
        """Load a step that cannot be verified, and seal its files as they are now."""
        self._log_error(
            "checkpoint of step %d was written, but its process died before its "
            "files were hashed: used unverified, because no other is left",
            step,
        )
        folder = self._directory / str(step)
        reason = misplacement(folder, self._run_id)
        loaded = load(step) if reason is None else None
        if loaded is None:
            reason = reason or _OTHER_ARRAYS
            raise DataError(f"{folder} does not belong there: {reason}")
        if not self._read_only and self._cluster.is_leader:
            write_seal(folder, digests(folder))
            unsealed_mark(self._directory, step).unlink(missing_ok=True)
        return loaded

    def _log_error(self, *message: object) -> None:
        if self._cluster.is_leader:
            log.error(*message)

    def _set_aside(self, step: int) -> None:
        """Move a step to the quarantine, unless the folder was opened only to read."""

        def move_step() -> None:
            target = self._directory / "quarantine" / f"{step}-{int(time.time())}"
            move_folder(self._directory / str(step), target)
            unsealed_mark(self._directory, step).unlink(missing_ok=True)
            log.error("set aside as %s", target)

        if not self._read_only:
            self._cluster.broadcast(move_step)
            self._moved = True


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
