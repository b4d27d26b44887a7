"""Save the train state in the background and seal each step with digests.

A saved step appears atomically, and its digests let a later start verify every file.
train/run/restore.py decides which step a start restores.

If a save fails or cannot begin, the caller logs a warning, and earlier steps stay. The
run ends only after more than `checkpoint.max_failed_saves` failures in a row, or if its
last save fails.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
from etils import epath

from data.storage import is_remote
from train.config import CheckpointConfig
from train.core.state import TrainState, as_saved
from train.distributed.processes import Cluster
from train.errors import CRASHED, Exit
from train.run.digests import (
    digests,
    is_sealed,
    remove_uncommitted,
    unsealed_mark,
    write_seal,
)
from train.run.orbax_fixes import SCORE, TARGETS, open_orbax
from train.run.restore import ALONE, FORMAT, SavedSteps

log = logging.getLogger(__name__)

_GRACE_S = 10.0  # how long a save waits for the previous save before it is skipped


class Checkpoints:
    """Saves steps under `<run_dir>/checkpoints`.

    Attributes:
        saved: the steps in the folder.
        failures: the number of saves that failed in a row; counted on process 0 only.
    """

    def __init__(
        self,
        directory: epath.Path,
        config: CheckpointConfig,
        cluster: Cluster = ALONE,
        before_save: Callable[[], None] = lambda: None,
        run_id: str | None = None,
        on_sealed: Callable[[int], None] = lambda step: None,
    ):
        """Open or create the folder, and remove the leftovers of interrupted saves.

        Process 0 calls `before_save` before each save; if this raises OSError, the save
        fails. Another thread of it calls `on_sealed` with each step that is complete.
        Saved steps record `run_id`; steps of another run are not restored.
        """
        self._run_id = run_id
        self._on_sealed = on_sealed
        self._before_save = before_save
        self._cluster = cluster
        self._config = config
        self._directory = directory
        if is_remote(directory) and self._cluster.is_leader:
            remove_uncommitted(directory)
        self._orbax = open_orbax(directory, config)
        self.saved = SavedSteps(directory, self._orbax, self._cluster, run_id)
        self._saved_at = time.monotonic()
        self._overdue_reported = False
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._saving: tuple[int, Future[None]] | None = None
        self._pending_mark: tuple[int, Future[str | None]] | None = None
        self._num_saves = 0
        self._best_loss: float | None = None  # None until the scores are read
        self._score: tuple[int, dict[str, Any]] | None = None  # the last evaluated step
        self.failures = 0

    def due(self, step: int) -> bool:
        """Return whether a save is due after this step."""
        return step % self._config.save_interval_steps == 0

    def record_loss(self, step: int, loss: float, targets: int | None = None) -> bool:
        """Record the validation loss of a step; return whether it is the best so far.

        It is compared with the losses of earlier starts that scored the same number of
        targets. All processes must call this together. The result is the same on all.
        """
        if not self._config.keep_best or not math.isfinite(loss):
            return False
        best = self._best_loss
        if best is None:
            saved = self._cluster.broadcast(
                lambda: [*self.saved.scores_by_targets()[targets].values()]
            )
            best = min(saved, default=math.inf)
        self._score = step, {SCORE: loss, TARGETS: targets}
        self._best_loss = min(loss, best)
        return loss < best

    def due_by_time(self) -> bool:
        """Return whether the last save is too old; True at most once between saves."""
        if self._overdue_reported:
            return False
        minutes = (time.monotonic() - self._saved_at) / 60
        self._overdue_reported = minutes >= self._config.save_interval_minutes
        return self._overdue_reported

    def save(
        self, step: int, state: TrainState, metadata: dict[str, Any], last: bool = False
    ) -> str | None:
        """Copy the state off the devices and write it in the background.

        Args:
            step: the number of completed updates.
            state: may be donated as soon as this returns.
            metadata: JSON that is saved with the state, in addition to the step, the
                run's id and the format.
            last: whether this is the last save, which waits until earlier saves end.

        Returns:
            The reason why this or the previous save failed; None if neither did.

        Raises:
            Exit: too many saves in a row failed, or the last save cannot begin.
        """
        self._saved_at = time.monotonic()
        self._overdue_reported = False
        if self._saving:
            wait([self._saving[1]], None if last else _GRACE_S)
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        decision = self._cluster.broadcast(lambda: self._decide(step, nbytes, last))
        if self._saving and decision["ended"]:
            self._saving = None
        if decision["reload"]:
            self._orbax.reload()
        if decision["fatal"]:
            raise Exit(CRASHED, f"step {step}: {decision['fatal']}")
        if decision["save"]:
            identity = {"step": step, "run_id": self._run_id, "format": FORMAT}
            self._begin(step, state, metadata | identity)
        return decision["failure"]

    def _decide(self, step: int, nbytes: int, last: bool) -> dict[str, Any]:
        """Return, on process 0, whether to save and how the previous save ended."""
        failure = None
        previous_ended = self._saving is None or self._saving[1].done()
        if self._saving and previous_ended:
            previous_step, save_future = self._saving
            error = save_future.exception()
            self.failures = self.failures + 1 if error else 0
            if error:
                reason = _summarize(error)
                failure = f"the save of step {previous_step} failed: {reason}"
                others = (s for s in self.saved.steps() if s != previous_step)
                is_unneeded = previous_step == step or any(
                    is_sealed(self._directory / f"{other}") for other in others
                )
                self._remove_failed(previous_step, with_folder=is_unneeded)
        should_save = step not in self.saved.steps() or failure is not None
        obstacle = None
        if not previous_ended:
            obstacle = "the previous save is still running"
        elif should_save:
            obstacle = self._mark_begun(step, nbytes, last)
        if obstacle:
            self.failures += 1
            should_save = False
            failure = f"step {step} was not saved: {obstacle}"
        fatal = None
        if self.failures > self._config.max_failed_saves:
            limit = f"checkpoint.max_failed_saves={self._config.max_failed_saves}"
            fatal = f"{self.failures} saves in a row failed, above {limit}: {failure}"
        elif obstacle and last:
            fatal = f"the last save failed: {obstacle}"
        return {
            "save": should_save and not fatal,
            "ended": previous_ended,
            "reload": failure is not None and previous_ended,
            "failure": failure,
            "fatal": fatal,
        }

    def _remove_failed(self, step: int, with_folder: bool) -> None:
        """Remove a failed save, so that retention does not keep it instead of another.

        The step's folder, which may lack only its seal, is removed if `with_folder`.
        """
        try:
            for partial in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                partial.rmtree()  # frees space on a full disk
            if with_folder:
                (self._directory / str(step)).rmtree(missing_ok=True)
                unsealed_mark(self._directory, step).unlink(missing_ok=True)
        except OSError as error:
            reason = _summarize(error)
            log.warning("could not remove the failed step %d: %s", step, reason)

    def _mark_begun(self, step: int, nbytes: int, last: bool) -> str | None:
        """Mark a step as unsealed; return why it cannot be saved, or None if it can.

        A thread writes the mark, so that unresponsive storage does not block training.
        """
        marked_step = None
        while True:
            if not self._pending_mark:
                future = self._sealer.submit(
                    self._write_mark, step, nbytes, marked_step
                )
                self._pending_mark = step, future
            marked_step, future = self._pending_mark
            wait([future], None if last else _GRACE_S)
            if not future.done():
                return f"the storage has not answered since step {marked_step}"
            self._pending_mark = None
            if marked_step == step:
                return future.result()

    def _write_mark(self, step: int, nbytes: int, late_step: int | None) -> str | None:
        mark = unsealed_mark(self._directory, step)
        try:
            # The save of `late_step` was skipped: its mark was not written in time.
            if late_step is not None:
                unsealed_mark(self._directory, late_step).unlink(missing_ok=True)
            self._before_save()
            if not is_remote(self._directory):
                free = shutil.disk_usage(self._directory).free
                if free < nbytes:
                    return f"{free:,} bytes are free on the disk, {nbytes:,} are needed"
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text("")
        except Exit:
            raise
        except Exception as error:  # each store raises its own errors
            return _summarize(error)
        return None

    def _begin(self, step: int, state: TrainState, metadata: dict[str, Any]) -> None:
        self._num_saves += 1
        scored_step, score = self._score or (None, None)
        metrics = score if scored_step == step else None
        try:
            response = self._orbax.save_async(
                step,
                as_saved(state),
                force=True,
                metrics=metrics,
                custom_metadata=metadata,
            )
        except Exception as error:
            response = Future[None]()
            response.set_exception(error)
        seal_future = self._sealer.submit(self._seal, step, self._num_saves, response)
        self._saving = step, seal_future

    def _seal(self, step: int, save_number: int, response: Any) -> None:
        """Hash a share of a step's files on each process; process 0 seals the step."""
        cluster = self._cluster
        folder = self._directory / str(step)
        key = f"seal/{save_number}"
        response.result()
        if cluster.processes > 1 and cluster.is_leader:
            cluster.set(f"{key}/begin", "")  # the step's files are complete
        elif cluster.processes > 1:
            cluster.get(f"{key}/begin", cluster.timeout_s)
        hashes = digests(folder, cluster.process, cluster.processes)
        if cluster.processes > 1:
            gathered = cluster.gather(key, json.dumps(hashes))
            hashes = {k: v for text in gathered for k, v in json.loads(text).items()}
        if cluster.is_leader:
            write_seal(folder, hashes)
            self._on_sealed(step)
            unsealed_mark(self._directory, step).unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exit: the save failed.
        """
        if not self._saving:
            return
        step, save_future = self._saving
        self._saving = None
        error = save_future.exception()
        if failure := self._cluster.first_error(_summarize(error) if error else None):
            message = f"the last save, of step {step}, failed: {failure}. Older steps "
            message += "are intact: the same command continues from them"
            raise Exit(CRASHED, message)

    def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the save in flight, unless saves have failed."""
        if self._saving and not self.failures:
            wait([self._saving[1]], timeout_s)

    def close(self) -> None:
        """Wait for the save in flight, and close the folder."""
        self.wait()
        self._sealer.shutdown()
        self._orbax.close()


def _summarize(error: BaseException) -> str:
    """Return an error's type and first line; Orbax's errors have a thousand lines."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
