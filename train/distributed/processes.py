"""Let the processes of a run agree on shared values, once joining.py has joined them.

Small messages go through the key-value store of JAX's coordination service: any thread
may send them, and they do not wait for a device.
"""

import itertools
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from data.errors import DataError
from train.distributed.compat import key_value_client
from train.errors import ABORTED, WRONG_CONFIG, ConfigError, Exit, exit_code
from train.units import process_names

T = TypeVar("T")
_PREFIX = "longhaul"
_FOREVER_S = 10 * 365 * 86400


@dataclass(frozen=True)
class Cluster:
    """Exchanges values between this process and the others, if there are any."""

    process: int = 0
    processes: int = 1
    timeout_s: float = 300.0  # how long to wait until all processes have answered
    _rounds: itertools.count = field(default_factory=itertools.count)

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which logs and writes files."""
        return self.process == 0

    def set(self, key: str, value: str) -> bool:
        """Set a key that all processes can read; return False if it is already set."""
        try:
            key_value_client().key_value_set(f"{_PREFIX}/{key}", value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def get(self, key: str, timeout_s: float | None = None) -> str:
        """Return a key's value once it is set; raise TimeoutError after `timeout_s`."""
        milliseconds = int(1000 * (timeout_s or _FOREVER_S))
        try:
            client = key_value_client()
            return client.blocking_key_value_get(f"{_PREFIX}/{key}", milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(f"{key} did not come within {timeout_s} s") from None

    def wait(self, barrier: str, timeout_s: float) -> bool:
        """Wait for all processes at a barrier; return False if some are missing."""
        if self.processes == 1:
            return True
        try:
            milliseconds = int(1000 * timeout_s)
            key_value_client().wait_at_barrier(f"{_PREFIX}/{barrier}", milliseconds)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def gather(self, key: str, value: str) -> list[str]:
        """Return, on process 0, the values of all processes in order; [] on the others.

        Raises:
            Exit: some processes did not answer in time; the message names them.
        """
        self.set(f"{key}/{self.process}", value)
        values = list[str]()
        late = list[int]()
        if not self.is_leader:
            return values
        deadline = time.monotonic() + self.timeout_s
        for process in range(self.processes):
            try:
                remaining_s = max(0.001, deadline - time.monotonic())
                values.append(self.get(f"{key}/{process}", remaining_s))
            except TimeoutError:
                late.append(process)
        if late:
            raise Exit(
                ABORTED,
                f"no answer from {process_names(late)} within "
                f"distributed.barrier_timeout_s={self.timeout_s:.0f}",
            )
        # Otherwise the values of all saves would pile up in the store's memory.
        key_value_client().key_value_delete(f"{_PREFIX}/{key}/")
        return values

    def broadcast(self, compute: Callable[[], Any]) -> Any:
        """Return, on all processes, the JSON value that process 0 computes.

        Raises:
            Exit: on the others, with process 0's exit code, if process 0 failed.
        """
        return self.broadcast_progress(lambda beat: compute(), lambda: None)

    def broadcast_progress(
        self, compute: Callable[[Callable[[], object]], Any], beat: Callable[[], object]
    ) -> Any:
        """Broadcast a value that takes long; the others wait while it makes progress.

        `compute` receives a function to call whenever it has made progress. Each call
        runs `beat` on process 0 and, at most once in `timeout_s / 10`, on the others.

        Raises:
            Exit: as for `broadcast`; ABORTED if there was no progress for twice
                `timeout_s`.
        """
        if self.processes == 1:
            return compute(beat)
        key = f"broadcast/{next(self._rounds)}"
        if not self.is_leader:
            return self._await_answer(key, beat)
        numbers = itertools.count()
        answered_at = time.monotonic()

        def send(**content: Any) -> None:
            self.set(f"{key}/{next(numbers)}", json.dumps(content))

        def progress() -> None:
            nonlocal answered_at
            beat()
            if time.monotonic() - answered_at > self.timeout_s / 10:
                answered_at = time.monotonic()
                send(working=True)

        try:
            result = compute(progress)
        except BaseException as error:
            send(code=exit_code(error))
            raise
        send(value=result)
        return result

    def _await_answer(self, key: str, beat: Callable[[], object]) -> Any:
        """Return the value that process 0 broadcasts; wait while it makes progress."""
        for number in itertools.count():
            try:  # process 0 may itself wait `timeout_s` for another process
                answer = json.loads(self.get(f"{key}/{number}", 2 * self.timeout_s))
            except TimeoutError:
                message = f"process {self.process}: process 0 has said nothing for "
                message += f"twice distributed.barrier_timeout_s={self.timeout_s:.0f}"
                raise Exit(ABORTED, message) from None
            beat()
            if "code" in answer:
                raise Exit(answer["code"], "")  # process 0 logs the reason
            if "value" in answer:
                return answer["value"]

    def on_leader(self, action: Callable[[], T]) -> T | None:
        """Call a function on process 0 and return its result; the others return None.

        Raises:
            Exit: on the others, with process 0's exit code, if process 0 failed.
        """
        results: list[T] = []
        self.broadcast(lambda: results.append(action()))
        return results[0] if results else None

    def first_error(self, error: str | None) -> str | None:
        """Return, on all processes, the error of the first process that has one."""
        if self.processes == 1:
            return error
        return self._reduce(error or "", lambda texts: next(filter(None, texts), None))

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Check that `facts` succeeds on all processes, with equal results.

        Args:
            facts: runs this process's checks, and returns what must be equal, by name.

        Raises:
            Exit: if a process failed or differs; only process 0's message names it.
            Exception: on process 0, what `facts` raised there.
        """
        if self.processes == 1:
            facts()
            return
        failure: Exception | None = None
        try:
            report = {"facts": {**facts(), "host": socket.gethostname()}}
        except Exception as error:
            failure = error
            message = str(error)
            if not isinstance(error, Exit | ConfigError | DataError):
                message = f"{type(error).__name__}: {message}"
            report = {"code": exit_code(error), "error": message}

        def verdict(texts: list[str]) -> None:
            if failure is not None:
                raise failure  # the others probably failed alike; report it once
            reports = [json.loads(text) for text in texts]
            if failed := {p: r for p, r in enumerate(reports) if "code" in r}:
                lines = [f"process {p}: {r['error']}" for p, r in failed.items()]
                raise Exit(next(iter(failed.values()))["code"], "\n".join(lines))
            if differing := _differences([report["facts"] for report in reports]):
                rule = "must be the same on all processes:"
                raise Exit(WRONG_CONFIG, "\n".join([rule, *differing]))

        self._reduce(json.dumps(report), verdict)

    def _reduce(self, value: str, verdict: Callable[[list[str]], T]) -> T:
        """Return, on all processes, what process 0 concludes from the values of all."""
        key = f"reduce/{next(self._rounds)}"
        if not self.is_leader:
            self.gather(key, value)
        return self.broadcast(lambda: verdict(self.gather(key, value)))


def _differences(facts: list[dict[str, str]]) -> list[str]:
    """Return lines that list, for each fact that differs, its values by frequency."""
    lines = []
    for name in dict.fromkeys(key for fact in facts for key in fact if key != "host"):
        holders: dict[str, list[int]] = {}
        for process, fact in enumerate(facts):
            holders.setdefault(fact.get(name, "nothing"), []).append(process)
        if len(holders) > 1:
            common_first = sorted(holders.items(), key=lambda item: -len(item[1]))
            lines.append(f"  {name}:")
            lines += [
                f"    {value} on {process_names(processes)} "
                f"(host {facts[processes[0]]['host']})"
                for value, processes in common_first
            ]
    return lines
