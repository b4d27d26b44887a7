"""Save and restore the train state: Orbax behind one thin class.

Saves are asynchronous, appear atomically, and are then sealed with digests of all their
files, in the background. A run takes the newest step that is sealed and is still what
was written. A damaged one is set aside, loudly, never deleted. One that was whole but
not yet sealed when its process died is taken only if there is no sealed one. If
checkpoints exist and none is good that is an error: a run never silently starts over.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

from data.errors import DataError
from train.config import CheckpointConfig
from train.digests import damage, is_sealed, seal
from train.spikes import Recent
from train.state import TrainState, as_saved, best_params

log = logging.getLogger(__name__)
policies = ocp.training.preservation_policies


def _vanishes(folder: epath.Path) -> bool:
    """Say whether a step is making way for a later one, as its preservation has it."""
    for _ in range(50):
        if not folder.exists():
            return True
        time.sleep(0.1)
    return False


class Checkpoints:
    """The steps saved under `<run_dir>/checkpoints`."""

    def __init__(
        self, directory: epath.Path, config: CheckpointConfig, read_only: bool = False
    ):
        """Open the folder; made if missing, leftovers of dead saves removed."""
        self._read_only = read_only
        self._config, self._directory = config, directory
        keep: list[Any] = [policies.LatestN(config.keep_latest)]
        if config.keep_every_steps:
            keep.append(policies.EveryNSteps(config.keep_every_steps))
        self._orbax = ocp.training.Checkpointer(
            directory,
            preservation_policy=cast(Any, policies.AnyPreservationPolicy(keep)),
            cleanup_tmp_directories=not read_only,
        )
        self._saved_at = time.monotonic()
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._sealing: list[Future[None]] = []

    def steps(self) -> list[int]:
        """List the steps there are, ascending."""
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def due(self, step: int) -> bool:
        """Decide whether to save after this many updates; process 0's clock counts."""
        if step % self._config.save_interval_steps == 0:
            return True
        minutes = (time.monotonic() - self._saved_at) / 60
        overdue = minutes >= self._config.save_interval_minutes
        if jax.process_count() == 1:
            return overdue
        from jax.experimental import multihost_utils

        return bool(multihost_utils.broadcast_one_to_all(overdue))

    def save(self, step: int, state: TrainState, about: dict[str, Any]) -> None:
        """Copy the state off the devices and write it in the background.

        Args:
            step: completed updates.
            state: of the devices; may be donated as soon as this returns.
            about: JSON put beside it: config, data fingerprint, mesh, versions.
        """
        if step in self.steps():
            return
        self._raise_failures()
        if jax.process_index() == 0:
            self._mark(step).parent.mkdir(parents=True, exist_ok=True)
            self._mark(step).write_text("")
        written = self._orbax.save_async(
            step, as_saved(state), force=True, custom_metadata=about
        )
        if jax.process_index() == 0:
            self._sealing.append(self._sealer.submit(self._seal, step, written))
        self._saved_at = time.monotonic()

    def _mark(self, step: int) -> epath.Path:
        """Name what says that a step is being written: it may lack its seal."""
        return self._directory / "unsealed" / str(step)

    def _seal(self, step: int, written: Any) -> None:
        if written is not None:
            written.result()
        folder = self._directory / str(step)
        try:
            seal(folder)
        except OSError:
            if not _vanishes(folder):
                raise
        self._mark(step).unlink(missing_ok=True)

    def _raise_failures(self) -> None:
        """Raise what went wrong with a seal, once."""
        ended = [sealing for sealing in self._sealing if sealing.done()]
        self._sealing = [s for s in self._sealing if s not in ended]
        for sealing in ended:
            sealing.result()

    def restore(self, like: TrainState, step: int | None = None) -> TrainState | None:
        """Restore the newest step that is what was written, or the one asked for.

        Args:
            like: `jax.ShapeDtypeStruct` leaves with the shardings to restore to,
                whatever mesh the step was saved from.
            step: only this one.

        Returns:
            None if there is no checkpoint at all, nor any that was set aside.

        Raises:
            DataError: if there are checkpoints and none is good, or not the one asked
                for.
        """
        steps = self.steps() if step is None else [step]
        sealed = [s for s in steps if is_sealed(self._directory / str(s))]
        unsealed = [s for s in steps if s not in sealed and self._mark(s).exists()]
        for candidate in [s for s in reversed(steps) if s not in unsealed]:
            wrong = self._damage(candidate)
            if wrong is None:
                state = self._load(candidate, like)
                for other in [] if self._read_only else unsealed:
                    # Else the run would not save this step when it comes there again.
                    log.error("checkpoint of step %d was never hashed", other)
                    self._set_aside(other)
                return state
            log.error("checkpoint of step %d is damaged: %s", candidate, wrong)
            if not self._read_only:
                self._set_aside(candidate)
        for candidate in reversed(unsealed):
            log.warning(
                "checkpoint of step %d was written, but its process died before its "
                "files were hashed: taken unverified, for want of another",
                candidate,
            )
            state = self._load(candidate, like)
            if not self._read_only and jax.process_index() == 0:
                self._seal(candidate, None)
            return state
        quarantine = self._directory / "quarantine"
        if steps or (quarantine.exists() and any(quarantine.iterdir())):
            raise DataError(
                f"{self._directory}: no checkpoint is what was written (tried "
                f"{steps}); not starting over. Put one back (what was set aside is in "
                f"{quarantine}), or take another run.name"
            )
        return None

    def _damage(self, step: int) -> str | None:
        """Say what is wrong with a step; each process looks at a part of it."""
        part, parts = jax.process_index(), jax.process_count()
        wrong = damage(self._directory / str(step), part, parts)
        if parts > 1:
            from jax.experimental import multihost_utils

            if multihost_utils.process_allgather(jnp.array(wrong is not None)).any():
                wrong = wrong or "another process found it"
        return wrong

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
        if jax.process_index() == 0:
            quarantine = self._directory / "quarantine"
            quarantine.mkdir(parents=True, exist_ok=True)
            target = quarantine / f"{step}-{int(time.time())}"
            (self._directory / str(step)).rename(target)
            self._mark(step).unlink(missing_ok=True)
            log.error("set aside as %s", target)
        self._orbax.reload()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exception: whatever made it fail.
        """
        self._orbax.wait()
        sealing, self._sealing = self._sealing, []
        for step in sealing:
            step.result()

    def close(self) -> None:
        """Wait for the save in flight, and let go of the folder."""
        self.wait()
        self._sealer.shutdown()
        self._orbax.close()
