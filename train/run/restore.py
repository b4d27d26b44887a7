"""Choose the checkpoint to go on from: the newest that is still what was written.

A step that is damaged, of another number than its folder says, or of another run is set
aside, loudly, never deleted. One that was whole but not yet sealed when its process
died is taken only if there is no sealed one. If checkpoints exist and none is good that
is an error: a run never silently starts over.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from data.errors import DataError
from data.storage import move_folder
from model.params import named
from train.distributed.processes import Cluster
from train.errors import ConfigError, Mistake
from train.optimizer.update import OptimizerState, averages
from train.run.contents import best_to_load, to_load
from train.run.digests import digests, is_sealed, misplaced, objection, write_seal
from train.run.orbax_fixes import SCORE, open_orbax
from train.state import TrainState

log = logging.getLogger(__name__)

ALONE = Cluster()
Repack = Callable[[Any, jax.Array], Any] | None
_OTHER_ARRAYS = "its arrays are those of another step"


def unsealed_mark(directory: epath.Path, step: int) -> epath.Path:
    """Return the file whose presence says that a step may still lack its seal."""
    return directory / "unsealed" / str(step)


class SavedSteps:
    """The steps saved under `<run_dir>/checkpoints`."""

    def __init__(
        self,
        directory: epath.Path,
        orbax: Any = None,
        cluster: Cluster = ALONE,
        run_id: str | None = None,
    ):
        """Open the folder; without the `orbax` of a run only to read: all stays.

        Steps of another run than `run_id` are not used; None: all are.
        """
        self._directory, self._cluster, self._run_id = directory, cluster, run_id
        self._read_only, self._orbax = orbax is None, orbax or open_orbax(directory)
        self._moved = False  # whether a step was, since Orbax has listed them

    def steps(self) -> list[int]:
        """List the steps there are, ascending."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def scores(self) -> dict[int, float]:
        """Return the validation loss of each step that was evaluated and is there."""
        metrics = {each.step: each.metrics or {} for each in self._orbax.checkpoints}
        return {step: m[SCORE] for step, m in metrics.items() if SCORE in m}

    def best(self) -> int:
        """Return the step of the lowest validation loss.

        Raises:
            ConfigError: if no step that is there was evaluated.
        """
        if scores := self.scores():
            return min(scores, key=lambda step: scores[step])
        rule = "no checkpoint there was evaluated; train with checkpoint.keep_best=true"
        raise ConfigError([Mistake("step", "best", rule)])

    def restore(
        self,
        like: TrainState,
        step: int | None = None,
        at_most: int | None = None,
        repack: Repack = None,
    ) -> TrainState | None:
        """Restore the newest step that is what was written, or the one asked for.

        Args:
            like: `jax.ShapeDtypeStruct` leaves with the shardings to restore to,
                whatever mesh the step was saved from.
            step: only this one.
            at_most: the newest up to this one; later ones are set aside.
            repack: from optax's state and the step to the same state with its moments
                as `like` has them; None: they stay as they were saved.

        Returns:
            None if there is no checkpoint at all, nor any that was set aside.

        Raises:
            DataError: if there are checkpoints and none is good, or not the one asked
                for.
            ConfigError: if all are later than at_most, or the one asked for is not
                there, or does not fit.
        """
        return self._first_good(
            lambda step: self._load(step, like, repack), step, at_most
        )

    def _first_good(
        self,
        load: Callable[[int], Any],
        step: int | None = None,
        at_most: int | None = None,
    ) -> Any:
        """Load the newest step that is what was written, as `restore` has it."""
        try:
            return self._try_each(load, step, at_most)
        finally:
            if self._moved:  # once: Orbax reads what is said of every step
                self._moved = False
                self._orbax.reload()

    def _try_each(
        self, load: Callable[[int], Any], step: int | None, at_most: int | None
    ) -> Any:
        steps, unsealed = [] if step is None else [step], list[int]()
        if step is None:
            steps, unsealed = self._cluster.broadcast(self._list)
        elif step not in (there := self.steps()):
            listed = ", ".join(map(str, there)) or "none yet"
            rule = f"must be a step that was saved; there are: {listed}"
            raise ConfigError([Mistake("step", step, rule)])
        if at_most is not None:
            steps, unsealed = self._rewind(steps, unsealed, at_most)
        for candidate in [s for s in reversed(steps) if s not in unsealed]:
            wrong = self._objection(candidate)
            loaded = load(candidate) if wrong is None else None
            if loaded is not None:
                for other in [] if self._read_only else unsealed:
                    # Else the run would not save this step when it comes there again.
                    self._warn("checkpoint of step %d was never hashed", other)
                    self._set_aside(other)
                return loaded
            wrong = wrong or f"does not belong there: {_OTHER_ARRAYS}"
            self._warn("checkpoint of step %d %s", candidate, wrong)
            self._set_aside(candidate)
        if unsealed:
            return self._load_unsealed(unsealed[-1], load)
        quarantine = self._directory / "quarantine"
        if steps or (quarantine.exists() and any(quarantine.iterdir())):
            raise DataError(
                f"{self._directory}: no checkpoint is what was written (tried "
                f"{steps}); not starting over. Put one back (what was set aside is in "
                f"{quarantine}), or take another run.name"
            )
        return None

    def restore_params(
        self, like: TrainState, step: int | None = None
    ) -> tuple[int, Any]:
        """Restore what to evaluate: the average of weights if kept, else the weights.

        Nothing else of the state is read, nor has room in memory.

        Returns:
            The step, and the tree of parameters.

        Raises:
            ConfigError: if there is no such step, or it does not fit.
            DataError: if it cannot be read, or if there is no checkpoint.
        """

        def load(step: int) -> tuple[int, Any]:
            wanted = best_to_load(self._saved(step), like)
            loaded = self._read(step, wanted)
            return step, loaded.get("params") or loaded["optimizer"]["average"]

        found = self._first_good(load, step)
        if found is None:
            raise DataError(f"{self._directory}: there is no checkpoint yet")
        return found

    def _list(self) -> tuple[list[int], list[int]]:
        """Return, on process 0, which steps there are, and which were never hashed.

        The mark of a step that was sealed or never written is removed.
        """
        steps = self.steps()
        unsealed = [
            step
            for step in steps
            if not is_sealed(self._directory / str(step))
            and unsealed_mark(self._directory, step).exists()
        ]
        marks = unsealed_mark(self._directory, 0).parent
        if not self._read_only and marks.exists():
            for mark in marks.iterdir():
                if mark.name not in map(str, unsealed):
                    mark.unlink(missing_ok=True)
        return steps, unsealed

    def _rewind(
        self, steps: list[int], unsealed: list[int], at_most: int
    ) -> tuple[list[int], list[int]]:
        """Set aside what is later than a step."""
        if steps and at_most < min(steps):
            rule = f"must leave a checkpoint to go on from; there are steps {steps}"
            raise ConfigError([Mistake("run.rewind_to", at_most, rule)])
        for step in [step for step in steps if step > at_most]:
            self._set_aside(step)
        kept = [step for step in steps if step <= at_most]
        return kept, [step for step in unsealed if step <= at_most]

    def _objection(self, step: int) -> str | None:
        """Return what is wrong with a step; each process looks at a part of it."""
        cluster, folder = self._cluster, self._directory / str(step)
        wrong = objection(folder, cluster.process, cluster.processes, self._run_id)
        return cluster.first_error(wrong)

    def _saved(self, step: int) -> dict[str, Any]:
        """Return shapes and dtypes of what a step holds, by name."""
        return dict(named(self._orbax.metadata(step).metadata))

    def _read(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        """Read some of what a step holds."""
        try:
            return self._orbax.load(step, abstract_state=wanted)
        except Exception as error:
            error.add_note(
                f"The files of the checkpoint of step {step} are what was written: "
                f"there was no memory, disk or network."
            )
            raise

    def _load(self, step: int, like: TrainState, repack: Repack) -> TrainState | None:
        """Load a step, and begin what it does not hold: an average, recent steps.

        None if its arrays are those of another step.
        """
        loaded = self._read(step, to_load(self._saved(step), like))
        if int(loaded["step"]) != step:
            return None
        transform, average = map(loaded["optimizer"].get, OptimizerState._fields)
        params, recent = loaded["params"], loaded.get("recent")
        wanted = like.optimizer
        if repack is not None and (
            jax.tree.structure(transform) != jax.tree.structure(wanted.transform)
        ):
            self._warn("the moments of step %d were kept otherwise: rounded once", step)
            repacked = jax.jit(repack, out_shardings=_shardings(wanted.transform))
            transform = repacked(transform, loaded["step"])
        if wanted.average is not None and average is None:
            self._warn("step %d has no average of weights: begun at the weights", step)
            begin = jax.jit(averages, out_shardings=_shardings(wanted.average))
            average = begin(params)
        if like.recent is not None and recent is None:
            recent = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like.recent
            )
        optimizer = OptimizerState(transform, average)
        return TrainState(loaded["step"], params, optimizer, recent)

    def _load_unsealed(self, step: int, load: Callable[[int], Any]) -> Any:
        """Load a step that nothing can verify, and seal it as it is."""
        self._warn(
            "checkpoint of step %d was written, but its process died before its "
            "files were hashed: taken unverified, for want of another",
            step,
        )
        folder = self._directory / str(step)
        wrong = misplaced(folder, self._run_id)
        loaded = load(step) if wrong is None else None
        if loaded is None:
            raise DataError(f"{folder} does not belong there: {wrong or _OTHER_ARRAYS}")
        if not self._read_only and self._cluster.is_leader:
            write_seal(folder, digests(folder))
            unsealed_mark(self._directory, step).unlink(missing_ok=True)
        return loaded

    def _warn(self, *message: object) -> None:
        if self._cluster.is_leader:
            log.error(*message)

    def _set_aside(self, step: int) -> None:
        """Move a step to the quarantine; a command on a run moves nothing."""

        def set_aside() -> None:
            target = self._directory / "quarantine" / f"{step}-{int(time.time())}"
            move_folder(self._directory / str(step), target)
            unsealed_mark(self._directory, step).unlink(missing_ok=True)
            log.error("set aside as %s", target)

        if not self._read_only:
            self._cluster.broadcast(set_aside)
            self._moved = True


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
