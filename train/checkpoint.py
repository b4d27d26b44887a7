"""Save and restore the train state: Orbax behind one thin class.

Saves are asynchronous and appear atomically. A run looks for its state among its
checkpoints, newest first; one that cannot be read is set aside, loudly, never deleted.
If checkpoints exist and none can be read that is an error: a run never silently starts
over.
"""

import logging
import textwrap
import time
from typing import Any, cast

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from data.errors import DataError
from train.config import CheckpointConfig
from train.state import TrainState, best_params

log = logging.getLogger(__name__)
policies = ocp.training.preservation_policies


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
        self._orbax.save_async(step, state, force=True, custom_metadata=about)
        self._saved_at = time.monotonic()

    def restore(self, like: TrainState, step: int | None = None) -> TrainState | None:
        """Restore the newest step that can be read, or the one asked for.

        Args:
            like: `jax.ShapeDtypeStruct` leaves with the shardings to restore to,
                whatever mesh the step was saved from.
            step: only this one.

        Returns:
            None if there is no checkpoint at all, nor any that was set aside.

        Raises:
            DataError: if there are checkpoints and none can be read, or not the one
                asked for.
        """
        steps = self.steps() if step is None else [step]
        for candidate in reversed(steps):
            try:
                return self._orbax.load(candidate, abstract_state=like)
            except Exception as error:
                reason = textwrap.shorten(str(error), 300)
                log.error("checkpoint of step %d cannot be read: %s", candidate, reason)
                if not self._read_only:
                    self._set_aside(candidate)
        quarantine = self._directory / "quarantine"
        if steps or (quarantine.exists() and any(quarantine.iterdir())):
            raise DataError(
                f"{self._directory}: no checkpoint could be read (tried {steps}); "
                f"not starting over. Put one back (what was set aside is in "
                f"{quarantine}), or take another run.name"
            )
        return None

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
            log.error("set aside as %s", target)
        self._orbax.reload()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exception: whatever made it fail.
        """
        self._orbax.wait()

    def close(self) -> None:
        """Wait for the save in flight, and let go of the folder."""
        self.wait()
        self._orbax.close()
