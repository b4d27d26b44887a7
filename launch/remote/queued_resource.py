"""A queued resource: TPU slices that Google Cloud hands out when it has them.

States: docs.cloud.google.com/tpu/docs/queued-resources, and QueuedResourceState of the
v2 API. Spot machines that were taken away do not come back by themselves: what is left
of the request, which would still hold quota, is deleted and made again.
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
from launch.remote.gcloud import GcloudError, call, commands, hopeless_status
from launch.subprocesses import ASK_S
from launch.supervisor import Wait
from train.errors import CRASHED, WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

ACTIVE = "ACTIVE"
_ON_THE_WAY = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
_FAILURES = 5  # in a row, of what may pass
_PAUSE_S, _LONGEST_S = 10.0, 300.0
_ASK_AGAIN_S = 30.0


@dataclass(frozen=True)
class ResourceState:
    """The state of a request (None: there is no request), and the cloud's reason."""

    state: str | None
    why: str = ""
    code: int | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.state or "not there", self.why]))


class QueuedResource:
    """One request by name; `diary` gets a JSON line for each state."""

    def __init__(self, name: str, cluster: TpuVmCluster, diary: Path):
        self.name, self._cluster, self._diary = name, cluster, diary
        self._commands = commands(name, cluster)
        self._seen = ""  # the last state; empty as long as gcloud has not answered
        self._failures = 0

    def look(self) -> ResourceState:
        """Return its state.

        Raises:
            GcloudError: gcloud could not ask.
        """
        try:
            answer = json.loads(call(self._commands["describe"], ASK_S))
        except GcloudError as error:
            if not error.is_status("NOT_FOUND"):
                raise
            return ResourceState(None)
        state: dict[str, Any] = answer.get("state", {})
        error = state.get("failedData", {}).get("error", {})
        why = error.get("message", "")
        if "stateInitiator" in state and state["state"] not in (ACTIVE, *_ON_THE_WAY):
            why = why or f"by the {state['stateInitiator'].lower()}"
        return ResourceState(state.get("state"), why, error.get("code"))

    def ensure(self, wait: Wait, poll_s: float, stopped: Callable[[], bool]) -> bool:
        """Wait until the resource is active, and request it again as often as needed.

        Return False if a signal came or `stopped`.

        Raises:
            Exit: it cannot become active. The message says why.
        """
        pause_s = 0.0
        while not wait(pause_s):
            try:
                now = self.look()
            except GcloudError as error:
                if error.hopeless and not self._seen:
                    raise Exit(WRONG_CONFIG, self._refused(str(error))) from None
                log.warning("%s\nasked again in %.0f s", error, _ASK_AGAIN_S)
                pause_s = _ASK_AGAIN_S
                continue
            self._note(now)
            if stopped():  # who asked has deleted it, or will
                return False
            if now.state == ACTIVE:
                self._failures = 0
                return True
            try:
                pause_s = self._act(now, poll_s)
            except GcloudError as error:
                pause_s = self._after(error)
        return False

    def _act(self, now: ResourceState, poll_s: float) -> float:
        """Create or delete it, as is due; return the seconds to wait then."""
        if now.state is None:
            log.info("%s: asking for %s", self.name, self._cluster.target)
            call(self._commands["create"])
            return 0.0
        if now.state == "FAILED":
            expired = bool(self._cluster.valid_until) and "valid" in now.why.lower()
            if hopeless_status(now.code, now.why) or expired:
                raise Exit(CRASHED if expired else WRONG_CONFIG, self._refused(now.why))
            self._count_failure(now.why)
        elif now.state != "SUSPENDED":
            return poll_s  # it is being created or deleted
        call(self._commands["delete"])
        return min(poll_s * 2**self._failures, _LONGEST_S) if self._failures else 0.0

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures >= _FAILURES:
            raise Exit(CRASHED, self._refused(f"{why} ({_FAILURES} times)"))

    def _after(self, error: GcloudError) -> float:
        if error.is_status("ALREADY_EXISTS"):
            return 1.0
        if error.hopeless:
            raise Exit(WRONG_CONFIG, self._refused(str(error)))
        self._count_failure(str(error))
        pause_s = min(_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_S)
        log.warning("%s\nagain in %.0f s", error, pause_s)
        return pause_s

    def _refused(self, why: str) -> str:
        self._write("given up", why)
        return f"{self.name}: no {self._cluster.target} was to be had: {why}"

    def _note(self, now: ResourceState) -> None:
        """Log its state when that changes."""
        state = now.state or "not there"
        if state != self._seen:
            log.info("%s: %s", self.name, now)
            self._write(state, now.why)
        self._seen = state

    def _write(self, state: str, why: str) -> None:
        line = {"time": time.time(), "state": state, "why": why}
        with self._diary.open("a") as diary:
            diary.write(json.dumps(line) + "\n")

    def delete(self, tries: int = 3) -> None:
        """Delete it with its machines, and say loudly if that cannot be done."""
        for tries_left in reversed(range(tries)):
            try:
                if self.look().state is not None:
                    call(self._commands["delete"])
                    log.info("%s: deleted", self.name)
                return
            except GcloudError as error:
                log.warning("%s", error)
                time.sleep(_PAUSE_S if tries_left else 0)
        log.error(
            "%s COULD NOT BE DELETED, and may go on to cost money. By hand: %s",
            *(self.name, " ".join(self._commands["delete"])),
        )


def describe_states(diary: Path) -> Sequence[str]:
    """Return the states that it went through, a line each, the last ten."""
    lines = diary.read_text().splitlines()[-10:] if diary.exists() else []
    return [
        f"{datetime.fromtimestamp(line['time']):%F %T}   "
        + ": ".join(filter(None, [line["state"], line["why"]]))
        for line in map(json.loads, lines)
    ]
