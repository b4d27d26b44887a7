"""Save and restore the train state: Orbax behind one thin class.

Saves are asynchronous, appear atomically, and are then sealed with digests of all their
files, in the background. A run takes the newest step that is sealed and is still what
was written. A damaged one is set aside, loudly, never deleted. One that was whole but
not yet sealed when its process died is taken only if there is no sealed one. If
checkpoints exist and none is good that is an error: a run never silently starts over.

A save that cannot be begun, or fails, costs a warning; the steps there are stay. Only
`checkpoint.max_failed_saves` of them in a row, or the last one's failure, end the run.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

from data.errors import DataError
from train.config import CheckpointConfig
from train.distributed.processes import Cluster
from train.errors import CRASHED, ConfigError, Exit, Mistake
from train.run.digests import damage, digests, is_sealed, write_seal
from train.run.orbax_fixes import orbax_context
from train.run.orbax_log import say_failures_once
from train.run.storage import in_object_store, move, remove_uncommitted
from train.spikes import Recent
from train.state import TrainState, as_saved, best_params

log = logging.getLogger(__name__)
policies = ocp.training.preservation_policies

_GRACE_S = 10.0  # how long a save waits for the one before, then makes way for it


class Checkpoints:
    """The steps saved under `<run_dir>/checkpoints`."""

    def __init__(
        self,
        directory: epath.Path,
        config: CheckpointConfig,
        cluster: Cluster | None = None,
        read_only: bool = False,
        before_save: Callable[[], None] = lambda: None,
    ):
        """Open the folder; made if missing, leftovers of dead saves removed.

        Args:
            directory: `<run_dir>/checkpoints`.
            config: when to save and what to keep.
            cluster: the processes that save; None: only this one.
            read_only: leave everything as it is.
            before_save: called on process 0; an OSError fails the save.
        """
        say_failures_once()
        self._before_save = before_save
        self._read_only, self._cluster = read_only, cluster or Cluster()
        self._config, self._directory = config, directory
        keep: list[Any] = [policies.LatestN(config.keep_latest)]
        if config.keep_every_steps:
            keep.append(policies.EveryNSteps(config.keep_every_steps))
        remote = in_object_store(directory)
        if remote and self._cluster.first and not read_only:
            remove_uncommitted(directory)
        self._orbax = ocp.training.Checkpointer(
            directory,
            context=orbax_context(directory),
            preservation_policy=cast(Any, policies.AnyPreservationPolicy(keep)),
            cleanup_tmp_directories=not (read_only or remote),
        )
        self._saved_at, self._told_overdue = time.monotonic(), False
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._saving: tuple[int, Future[None]] | None = None
        self._attempts = 0
        self.failures = 0  # saves in a row that came to nothing; process 0's count

    def steps(self) -> list[int]:
        """List the steps there are, ascending."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def due(self, step: int) -> bool:
        """Say whether the number of steps calls for a save."""
        return step % self._config.save_interval_steps == 0

    def overdue(self) -> bool:
        """Say, once, that the time since the last save calls for one."""
        minutes = (time.monotonic() - self._saved_at) / 60
        overdue = minutes >= self._config.save_interval_minutes
        overdue, self._told_overdue = overdue and not self._told_overdue, overdue
        return overdue

    def save(
        self, step: int, state: TrainState, about: dict[str, Any], last: bool = False
    ) -> str | None:
        """Copy the state off the devices and write it in the background.

        Args:
            step: completed updates.
            state: of the devices; may be donated as soon as this returns.
            about: JSON put beside it: config, data fingerprint, mesh, versions.
            last: no other will follow: wait for the one in flight first.

        Returns:
            Why this save, or the one before, came to nothing; None if all is well.

        Raises:
            Exit: too many in a row came to nothing.
        """
        self._saved_at, self._told_overdue = time.monotonic(), False
        if self._saving:
            wait([self._saving[1]], None if last else _GRACE_S)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        plan = self._cluster.tell(lambda: self._plan(step, size, last))
        if self._saving and plan["ended"]:
            self._saving = None
        if plan["reload"]:
            self._orbax.reload()
        if plan["fatal"]:
            raise Exit(CRASHED, f"step {step}: {plan['fatal']}")
        if plan["go"]:
            self._begin(step, state, about)
        return plan["failure"]

    def _plan(self, step: int, size: int, last: bool) -> dict[str, Any]:
        """Decide, on process 0, whether to save, and what became of the save before."""
        failure, ended = None, self._saving is None or self._saving[1].done()
        if self._saving and ended:
            before, saving = self._saving
            error = saving.exception()
            self.failures = self.failures + 1 if error else 0
            if error:
                failure = f"the save of step {before} failed: {_line(error)}"
                self._remove(before)
        go = step not in self.steps() or failure is not None
        obstacle = None
        if not ended:
            obstacle = "the save before is not through yet"
        elif go:
            obstacle = self._mark_begun(step, size)
        if obstacle:
            self.failures += 1
            go, failure = False, f"step {step} was not saved: {obstacle}"
        fatal = None
        if self.failures > self._config.max_failed_saves:
            limit = f"checkpoint.max_failed_saves={self._config.max_failed_saves}"
            fatal = f"{self.failures} saves in a row failed, above {limit}: {failure}"
        elif obstacle and last:
            fatal = f"the last save came to nothing: {obstacle}"
        return {
            "go": go and not fatal,
            "ended": ended,
            "reload": failure is not None and ended,
            "failure": failure,
            "fatal": fatal,
        }

    def _remove(self, step: int) -> None:
        """Remove what a failed save left, before a good step makes way for it."""
        try:
            (self._directory / str(step)).rmtree(missing_ok=True)
            for partial in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                partial.rmtree()  # a full disk has no room for it
            self._mark(step).unlink(missing_ok=True)
        except OSError as error:
            log.warning("could not remove the failed step %d: %s", step, _line(error))

    def _mark_begun(self, step: int, size: int) -> str | None:
        """Leave the mark of a step that is being written; say what stands against."""
        try:
            self._before_save()
            if not in_object_store(self._directory):
                free = shutil.disk_usage(self._directory).free
                if free < size:
                    return f"{free:,} bytes are free on the disk, {size:,} are needed"
            self._mark(step).parent.mkdir(parents=True, exist_ok=True)
            self._mark(step).write_text("")
        except Exit:
            raise
        except Exception as error:  # each store has errors of its own
            return _line(error)
        return None

    def _begin(self, step: int, state: TrainState, about: dict[str, Any]) -> None:
        self._attempts += 1
        try:
            written = self._orbax.save_async(
                step, as_saved(state), force=True, custom_metadata=about
            )
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            self._saving = step, failed
            return
        sealing = self._sealer.submit(self._seal, step, self._attempts, written)
        self._saving = step, sealing

    def _mark(self, step: int) -> epath.Path:
        """Name what says that a step is being written: it may lack its seal."""
        return self._directory / "unsealed" / str(step)

    def _seal(self, step: int, attempt: int, written: Any) -> None:
        """Hash the files of a step, each process a part of them; process 0 seals it."""
        cluster, folder = self._cluster, self._directory / str(step)
        key = f"seal/{attempt}"
        written.result()
        if cluster.processes > 1 and cluster.first:
            cluster.set(f"{key}/begin", "")  # process 0 publishes the step
        elif cluster.processes > 1:
            cluster.get(f"{key}/begin", cluster.timeout_s)
        found = digests(folder, cluster.process, cluster.processes)
        if cluster.processes > 1:
            parts = cluster.gather(key, json.dumps(found))
            found = {k: v for part in parts for k, v in json.loads(part).items()}
        if cluster.first:
            write_seal(folder, found)
            self._mark(step).unlink(missing_ok=True)

    def restore(
        self, like: TrainState, step: int | None = None, at_most: int | None = None
    ) -> TrainState | None:
        """Restore the newest step that is what was written, or the one asked for.

        Args:
            like: `jax.ShapeDtypeStruct` leaves with the shardings to restore to,
                whatever mesh the step was saved from.
            step: only this one.
            at_most: the newest up to this one; later ones are set aside.

        Returns:
            None if there is no checkpoint at all, nor any that was set aside.

        Raises:
            DataError: if there are checkpoints and none is good, or not the one asked
                for.
            ConfigError: if all are later than at_most.
        """
        steps, unsealed = self._cluster.tell(self._found) if step is None else ([], [])
        steps = steps if step is None else [step]
        if at_most is not None:
            steps, unsealed = self._rewind(steps, unsealed, at_most)
        for candidate in [s for s in reversed(steps) if s not in unsealed]:
            wrong = self._damage(candidate)
            if wrong is None:
                state = self._load(candidate, like)
                for other in [] if self._read_only else unsealed:
                    # Else the run would not save this step when it comes there again.
                    self._say("checkpoint of step %d was never hashed", other)
                    self._set_aside(other)
                return state
            self._say("checkpoint of step %d is damaged: %s", candidate, wrong)
            if not self._read_only:
                self._set_aside(candidate)
        for candidate in reversed(unsealed):
            self._say(
                "checkpoint of step %d was written, but its process died before its "
                "files were hashed: taken unverified, for want of another",
                candidate,
            )
            state = self._load(candidate, like)
            if not self._read_only and self._cluster.first:
                folder = self._directory / str(candidate)
                write_seal(folder, digests(folder))
                self._mark(candidate).unlink(missing_ok=True)
            return state
        quarantine = self._directory / "quarantine"
        if steps or (quarantine.exists() and any(quarantine.iterdir())):
            raise DataError(
                f"{self._directory}: no checkpoint is what was written (tried "
                f"{steps}); not starting over. Put one back (what was set aside is in "
                f"{quarantine}), or take another run.name"
            )
        return None

    def _found(self) -> tuple[list[int], list[int]]:
        """Look, on process 0, which steps there are, and which were never hashed."""
        steps = self.steps()
        sealed = [s for s in steps if is_sealed(self._directory / str(s))]
        return steps, [s for s in steps if s not in sealed and self._mark(s).exists()]

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

    def _say(self, *message: object) -> None:
        if self._cluster.first:
            log.error(*message)

    def _damage(self, step: int) -> str | None:
        """Say what is wrong with a step; each process looks at a part of it."""
        cluster = self._cluster
        folder = self._directory / str(step)
        return cluster.any(damage(folder, cluster.process, cluster.processes))

    def _load(self, step: int, like: TrainState) -> TrainState:
        """Load a step; recent steps of which it holds none, or others, begin empty."""
        try:
            saved = self._orbax.metadata(step).metadata.get("recent")
            where = like.step.sharding
            recent = saved and jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
                Recent(**saved),
            )
            wanted = as_saved(like._replace(recent=recent))
            state = TrainState(**self._orbax.load(step, abstract_state=wanted))
        except Exception as error:
            error.add_note(
                f"The files of the checkpoint of step {step} are what was written: it "
                f"does not fit this config, or there was no memory, disk or network."
            )
            raise
        if recent == like.recent:
            return state
        empty = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like.recent
        )
        return state._replace(recent=empty)

    def restore_params(
        self, like: TrainState, step: int | None = None
    ) -> tuple[int, Any]:
        """Restore what to evaluate: the average of weights if kept, else the weights.

        Returns:
            The step, and the tree of parameters.

        Raises:
            DataError: if it cannot be read, or if there is no checkpoint.
        """
        state = self.restore(like, step)
        if state is None:
            raise DataError(f"{self._directory}: there is no checkpoint yet")
        return int(state.step), best_params(state)

    def _set_aside(self, step: int) -> None:
        def set_aside() -> None:
            target = self._directory / "quarantine" / f"{step}-{int(time.time())}"
            move(self._directory / str(step), target)
            self._mark(step).unlink(missing_ok=True)
            log.error("set aside as %s", target)

        self._cluster.tell(set_aside)
        self._orbax.reload()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exit: it failed; it was the last one.
        """
        if not self._saving:
            return
        step, saving = self._saving
        self._saving = None
        error = saving.exception()
        if wrong := self._cluster.any(_line(error) if error else None):
            raise Exit(
                CRASHED,
                f"the last save, of step {step}, failed: {wrong}. Nothing older was "
                f"touched: the same command goes on from there",
            )

    def close(self) -> None:
        """Wait for the save in flight, and let go of the folder."""
        self.wait()
        self._sealer.shutdown()
        self._orbax.close()


def _line(error: BaseException) -> str:
    """Say an error in a line: Orbax gives a thousand."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0][:300]}"
