"""A queued resource: a request for TPU slices, which waits until some are available.

Source of the states: docs.cloud.google.com/tpu/docs/queued-resources, and
QueuedResourceState of the v2 API. After a preemption of spot machines, the request does
not get machines again but still uses quota, so it is deleted and then made again.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.config import TpuVmCluster
from launch.remote.gcloud import GcloudError, call, is_permanent, resource_commands
from launch.subprocesses import QUERY_TIMEOUT_S
from launch.supervisor import Wait
from train.errors import CRASHED, WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

ACTIVE = "ACTIVE"
_PENDING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
_MAX_FAILURES = 5  # the run ends after this number of temporary failures in a row
_PAUSE_S = 10.0
_MAX_PAUSE_S = 300.0
_ASK_AGAIN_S = 30.0


@dataclass(frozen=True)
class ResourceState:
    """The state of a request (None: there is no request), why, and the error's code."""

    state: str | None
    why: str = ""
    code: int | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.state or "not there", self.why]))


class QueuedResource:
    """A request, identified by its name. Each new state adds a JSON line to `diary`."""

    def __init__(self, name: str, cluster: TpuVmCluster, diary: Path):
        self.name = name
        self._cluster = cluster
        self._diary = diary
        self._commands = resource_commands(name, cluster)
        self._last_state = ""  # empty until gcloud has answered
        self._failures = 0

    def query(self) -> ResourceState:
        """Return the state of the request, as gcloud describes it.

        Raises:
            GcloudError: gcloud could not read the state.
        """
        try:
            answer = json.loads(call(self._commands["describe"], QUERY_TIMEOUT_S))
        except GcloudError as error:
            if not error.is_status("NOT_FOUND"):
                raise
            return ResourceState(None)
        state: dict[str, Any] = answer.get("state", {})
        error = state.get("failedData", {}).get("error", {})
        why = error.get("message", "")
        if "stateInitiator" in state and state["state"] not in (ACTIVE, *_PENDING):
            why = why or f"by the {state['stateInitiator'].lower()}"
        return ResourceState(state.get("state"), why, error.get("code"))

    def ensure(self, wait: Wait, poll_s: float, is_stopped: Callable[[], bool]) -> bool:
        """Wait until the resource is active; request it if it does not exist or failed.

        Returns False if a signal came, or if `is_stopped` returns True.

        Raises:
            Exit: the resource cannot become active. The message says why.
        """
        pause_s = 0.0
        while not wait(pause_s):
            try:
                current = self.query()
            except GcloudError as error:
                if error.is_permanent and not self._last_state:
                    raise Exit(WRONG_CONFIG, self._record_failure(str(error))) from None
                log.warning("%s\nasking again in %.0f s", error, _ASK_AGAIN_S)
                pause_s = _ASK_AGAIN_S
                continue
            self._log_change(current)
            if is_stopped():  # do not request again what `action=stop` deletes
                return False
            if current.state == ACTIVE:
                self._failures = 0
                return True
            try:
                pause_s = self._create_or_delete(current, poll_s)
            except GcloudError as error:
                pause_s = self._pause_after(error)
        return False

    def _create_or_delete(self, current: ResourceState, poll_s: float) -> float:
        """Create the resource, or delete a failed one; return the seconds to wait."""
        if current.state is None:
            log.info("%s: asking for %s", self.name, self._cluster.target)
            call(self._commands["create"])
            return 0.0
        if current.state == "FAILED":
            expired = bool(self._cluster.valid_until) and "valid" in current.why.lower()
            if is_permanent(current.code, current.why) or expired:
                exit_code = CRASHED if expired else WRONG_CONFIG
                raise Exit(exit_code, self._record_failure(current.why))
            self._count_failure(current.why)
        elif current.state != "SUSPENDED":
            return poll_s  # the resource is being created or deleted
        call(self._commands["delete"])
        return min(poll_s * 2**self._failures, _MAX_PAUSE_S) if self._failures else 0.0

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            raise Exit(CRASHED, self._record_failure(f"{why} ({_MAX_FAILURES} times)"))

    def _pause_after(self, error: GcloudError) -> float:
        """Return the seconds to wait; raise Exit if another try would fail too."""
        if error.is_status("ALREADY_EXISTS"):
            return 1.0
        if error.is_permanent:
            raise Exit(WRONG_CONFIG, self._record_failure(str(error)))
        self._count_failure(str(error))
        pause_s = min(_PAUSE_S * 2 ** (self._failures - 1), _MAX_PAUSE_S)
        log.warning("%s\nagain in %.0f s", error, pause_s)
        return pause_s

    def _record_failure(self, why: str) -> str:
        """Write the failure to the diary; return the message for the user."""
        self._write_diary("given up", why)
        return f"{self.name}: no {self._cluster.target} was available: {why}"

    def _log_change(self, current: ResourceState) -> None:
        """Log the state, and add it to the diary, if it has changed."""
        state = current.state or "not there"
        if state != self._last_state:
            log.info("%s: %s", self.name, current)
            self._write_diary(state, current.why)
        self._last_state = state

    def _write_diary(self, state: str, why: str) -> None:
        line = {"time": time.time(), "state": state, "why": why}
        with self._diary.open("a") as diary:
            diary.write(json.dumps(line) + "\n")

    def delete(self, tries: int = 3) -> None:
        """Delete the resource with its machines; log an error if that fails."""
        for remaining_tries in reversed(range(tries)):
            try:
                if self.query().state is not None:
                    call(self._commands["delete"])
                    log.info("%s: deleted", self.name)
                return
            except GcloudError as error:
                log.warning("%s", error)
                time.sleep(_PAUSE_S if remaining_tries else 0)
        log.error(
            "%s COULD NOT BE DELETED, and may continue to cost money. Run: %s",
            self.name,
            " ".join(self._commands["delete"]),
        )


def describe_states(diary: Path) -> Sequence[str]:
    """Return one line for each of the last ten states in the diary."""
    lines = diary.read_text().splitlines()[-10:] if diary.exists() else []
    return [
        f"{datetime.fromtimestamp(line['time']):%F %T}   "
        f"{ResourceState(line['state'], line['why'])}"
        for line in map(json.loads, lines)
    ]
