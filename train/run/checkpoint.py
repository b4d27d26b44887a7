"""Save the train state in the background and seal each step with digests.

A step appears atomically; its digests then let a start verify every file. Which step a
start restores: train/run/restore.py.

A save that fails, or cannot begin, costs a warning; the saved steps stay. The run ends
only after more than `checkpoint.max_failed_saves` failures in a row, or if its last
save fails.
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
from train.distributed.processes import Cluster
from train.errors import CRASHED, Exit
from train.run.digests import (
    digests,
    is_sealed,
    remove_uncommitted,
    unsealed_mark,
    write_seal,
)
from train.run.orbax_fixes import SCORE, open_orbax
from train.run.restore import ALONE, SavedSteps
from train.state import TrainState, as_saved

log = logging.getLogger(__name__)

_GRACE_S = 10.0  # a save is skipped if the previous one takes this much longer


class Checkpoints:
    """Saves steps under `<run_dir>/checkpoints`.

    Attributes:
        saved: the steps in the folder.
        failures: the number of saves that failed in a row, on process 0.
    """

    def __init__(
        self,
        directory: epath.Path,
        config: CheckpointConfig,
        cluster: Cluster = ALONE,
        before_save: Callable[[], None] = lambda: None,
        run_id: str | None = None,
    ):
        """Open the folder; make it if missing, and remove what killed saves left.

        Process 0 calls `before_save` before each save; an OSError there fails the
        save. Steps are marked with `run_id`, and those of another run are not used.
        """
        self._run_id = run_id
        self._before_save, self._cluster = before_save, cluster
        self._config, self._directory = config, directory
        if is_remote(directory) and self._cluster.is_leader:
            remove_uncommitted(directory)
        self._orbax = open_orbax(directory, config)
        self.saved = SavedSteps(directory, self._orbax, self._cluster, run_id)
        self._saved_at, self._told_overdue = time.monotonic(), False
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._saving: tuple[int, Future[None]] | None = None
        self._marking: tuple[int, Future[str | None]] | None = None
        self._attempts = 0
        self._best: float | None = None  # None until it is read
        self._score: tuple[int, float] | None = None  # of the last evaluated step
        self.failures = 0

    def due(self, step: int) -> bool:
        """Return whether the number of steps calls for a save."""
        return step % self._config.save_interval_steps == 0

    def judge(self, step: int, loss: float) -> bool:
        """Note the validation loss of a step; return whether it is the best so far.

        All processes must call this together, and get the same answer.
        """
        if not self._config.keep_best or not math.isfinite(loss):
            return False
        best = self._best
        if best is None:
            scores = self._cluster.broadcast(lambda: [*self.saved.scores().values()])
            best = min(scores, default=math.inf)
        self._score, self._best = (step, loss), min(loss, best)
        return loss < best

    def overdue(self) -> bool:
        """Return whether a save is due by time; True only once until the next save."""
        if self._told_overdue:
            return False
        minutes = (time.monotonic() - self._saved_at) / 60
        self._told_overdue = minutes >= self._config.save_interval_minutes
        return self._told_overdue

    def save(
        self, step: int, state: TrainState, metadata: dict[str, Any], last: bool = False
    ) -> str | None:
        """Copy the state off the devices and write it in the background.

        Args:
            step: completed updates.
            state: may be donated as soon as this returns.
            metadata: JSON that is saved with the state, the step and the run's id.
            last: no other save will follow; wait for the one in flight first.

        Returns:
            Why this save, or the previous one, failed; None if neither did.

        Raises:
            Exit: too many saves in a row failed.
        """
        self._saved_at, self._told_overdue = time.monotonic(), False
        if self._saving:
            wait([self._saving[1]], None if last else _GRACE_S)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        decision = self._cluster.broadcast(lambda: self._decide(step, size, last))
        if self._saving and decision["ended"]:
            self._saving = None
        if decision["reload"]:
            self._orbax.reload()
        if decision["fatal"]:
            raise Exit(CRASHED, f"step {step}: {decision['fatal']}")
        if decision["save"]:
            self._begin(step, state, metadata | {"step": step, "run_id": self._run_id})
        return decision["failure"]

    def _decide(self, step: int, size: int, last: bool) -> dict[str, Any]:
        """Decide, on process 0, whether to save, and settle the previous save."""
        failure, ended = None, self._saving is None or self._saving[1].done()
        if self._saving and ended:
            previous_step, saving = self._saving
            error = saving.exception()
            self.failures = self.failures + 1 if error else 0
            if error:
                failure = f"the save of step {previous_step} failed: {_one_line(error)}"
                others = (s for s in self.saved.steps() if s != previous_step)
                other_sealed = any(is_sealed(self._directory / f"{s}") for s in others)
                self._remove(previous_step, previous_step == step or other_sealed)
        save = step not in self.saved.steps() or failure is not None
        obstacle = None
        if not ended:
            obstacle = "the previous save is still running"
        elif save:
            obstacle = self._mark_begun(step, size, last)
        if obstacle:
            self.failures += 1
            save, failure = False, f"step {step} was not saved: {obstacle}"
        fatal = None
        if self.failures > self._config.max_failed_saves:
            limit = f"checkpoint.max_failed_saves={self._config.max_failed_saves}"
            fatal = f"{self.failures} saves in a row failed, above {limit}: {failure}"
        elif obstacle and last:
            fatal = f"the last save failed: {obstacle}"
        return {
            "save": save and not fatal,
            "ended": ended,
            "reload": failure is not None and ended,
            "failure": failure,
            "fatal": fatal,
        }

    def _remove(self, step: int, including_step: bool) -> None:
        """Remove what a failed save left, before retention deletes a good step for it.

        A step that lacks only its seal may be the only one left.
        """
        try:
            for partial in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                partial.rmtree()  # a full disk has no room for it
            if including_step:
                (self._directory / str(step)).rmtree(missing_ok=True)
                unsealed_mark(self._directory, step).unlink(missing_ok=True)
        except OSError as error:
            reason = _one_line(error)
            log.warning("could not remove the failed step %d: %s", step, reason)

    def _mark_begun(self, step: int, size: int, last: bool) -> str | None:
        """Mark a step that is about to be written; return what prevents its save.

        A thread writes the mark, so that a silent storage does not stop training.
        """
        marked_step = None
        while True:
            if not self._marking:
                marking = self._sealer.submit(self._write_mark, step, size, marked_step)
                self._marking = step, marking
            marked_step, marking = self._marking
            wait([marking], None if last else _GRACE_S)
            if not marking.done():
                return f"the storage has not answered since step {marked_step}"
            self._marking = None
            if marked_step == step:
                return marking.result()

    def _write_mark(self, step: int, size: int, abandoned: int | None) -> str | None:
        mark = unsealed_mark(self._directory, step)
        try:
            if abandoned is not None:  # its mark came too late
                unsealed_mark(self._directory, abandoned).unlink(missing_ok=True)
            self._before_save()
            if not is_remote(self._directory):
                free = shutil.disk_usage(self._directory).free
                if free < size:
                    return f"{free:,} bytes are free on the disk, {size:,} are needed"
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text("")
        except Exit:
            raise
        except Exception as error:  # each store has errors of its own
            return _one_line(error)
        return None

    def _begin(self, step: int, state: TrainState, metadata: dict[str, Any]) -> None:
        self._attempts += 1
        scored_step, loss = self._score or (None, None)
        metrics = {SCORE: loss} if scored_step == step else None
        try:
            written = self._orbax.save_async(
                step,
                as_saved(state),
                force=True,
                metrics=metrics,
                custom_metadata=metadata,
            )
        except Exception as error:
            written = Future[None]()
            written.set_exception(error)
        sealing = self._sealer.submit(self._seal, step, self._attempts, written)
        self._saving = step, sealing

    def _seal(self, step: int, attempt: int, written: Any) -> None:
        """Hash the files of a step, a share on each process; process 0 seals it."""
        cluster, folder = self._cluster, self._directory / str(step)
        key = f"seal/{attempt}"
        written.result()
        if cluster.processes > 1 and cluster.is_leader:
            cluster.set(f"{key}/begin", "")  # process 0 publishes the step
        elif cluster.processes > 1:
            cluster.get(f"{key}/begin", cluster.timeout_s)
        hashed = digests(folder, cluster.process, cluster.processes)
        if cluster.processes > 1:
            parts = cluster.gather(key, json.dumps(hashed))
            hashed = {k: v for part in parts for k, v in json.loads(part).items()}
        if cluster.is_leader:
            write_seal(folder, hashed)
            unsealed_mark(self._directory, step).unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exit: the save failed.
        """
        if not self._saving:
            return
        step, saving = self._saving
        self._saving = None
        error = saving.exception()
        if failure := self._cluster.first_error(_one_line(error) if error else None):
            message = f"the last save, of step {step}, failed: {failure}. Older steps "
            message += "are intact: the same command continues from them"
            raise Exit(CRASHED, message)

    def finish(self, timeout_s: float) -> None:
        """Wait for the save in flight, unless earlier saves have failed."""
        if self._saving and not self.failures:
            wait([self._saving[1]], timeout_s)

    def close(self) -> None:
        """Wait for the save in flight, and close the folder."""
        self.wait()
        self._sealer.shutdown()
        self._orbax.close()


def _one_line(error: BaseException) -> str:
    """Return the first line of an error; Orbax writes a thousand."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
