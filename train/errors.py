"""Exit codes, and errors that list all mistakes of a config.

An exit code tells a launcher whether to start the run again. Launchers do so after
PREEMPTED, OWNED (once the owner is gone), ABORTED and, up to a limit, CRASHED and codes
that are not listed here. Launchers do not start the run again after the other codes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from data.errors import DataError, MissingPackageError, Mistake
from train.masking import MASK, holds_secret, mask_output, mask_values

FINISHED = 0
CRASHED = 1  # The reason is unknown; another start may succeed.
DIVERGED = 3
DOES_NOT_FIT = 4
NOT_PROVED = 5  # a mesh, a kernel or a size computes something else
PREEMPTED = 42
WRONG_DATA = 65
CRASHES_AGAIN = 70  # three times at the same step
OWNED = 75  # another live process owns the run
WRONG_CONFIG = 78
STOPPED = 130  # a person stopped the run
ABORTED = 134  # a watchdog fired, or a process was lost


class Exit(Exception):
    """Ends the program with a code and a message for people, without a traceback."""

    def __init__(self, code: int, message: str):
        self.code = code
        super().__init__(message)


_MEANINGS = {
    None: "unknown, left no exit code",
    FINISHED: "finished",
    DIVERGED: "diverged",
    DOES_NOT_FIT: "does not fit in the devices' memory",
    NOT_PROVED: "a mesh, a kernel or a size computes something else",
    PREEMPTED: "preempted",
    WRONG_DATA: "data missing or damaged",
    CRASHES_AGAIN: "crashed at one step again and again",
    OWNED: "another process owns the run",
    WRONG_CONFIG: "wrong config",
    STOPPED: "interrupted by a person",
    ABORTED: "aborted",
}


def meaning(code: int | None) -> str:
    """Describe how one start of a run (the life of its processes) ended.

    None means that it left no exit code: it was killed, or it still runs.
    """
    return _MEANINGS.get(code, f"crashed, exit code {code}")


class ConfigError(Exception):
    """The config is wrong. `mistakes` lists every mistake; the exit code is 78."""

    def __init__(self, mistakes: Sequence[Mistake]):
        self.mistakes = list(mistakes)
        super().__init__(self.mistakes)

    def __str__(self) -> str:
        count = len(self.mistakes)
        lines = [f"{count} mistake{'s' * (count != 1)} in the configuration:"]
        for key, value, rule, _ in self.mistakes:
            (safe,) = mask_values({key.rpartition(".")[2]: value}).values()
            shown = as_typed(safe)
            shown = MASK if holds_secret(f"{key}={shown}") else shown
            lines += ["", f"  {key} = {shown}" if value != "" else f"  {key}"]
            lines += [f"      {line}" for line in rule.splitlines()]
        return mask_output("\n".join(lines))


def as_typed(value: object) -> str:
    """Return a value in command-line syntax: null, true, [1,2], {a: 1}."""
    if isinstance(value, dict):
        entries = (f"{as_typed(k)}: {as_typed(v)}" for k, v in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


@contextlib.contextmanager
def writing(key: str, path: object) -> Iterator[None]:
    """Write the output at `path`, which the config key `key` names.

    Raises:
        ConfigError: the output cannot be written. A broken connection, which another
            start may not meet, keeps its own error.
    """
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        file = error.filename2 or error.filename or path
        rule = f"{file} cannot be written: {error.strerror or error}. "
        rule += "Name a place where you may write"
        raise ConfigError([Mistake(key, str(path), rule)]) from None


def check_all(*checks: Callable[[], Any]) -> list[Any]:
    """Run every check and return their results.

    Raises:
        ConfigError: with the mistakes of all checks.
    """
    results = []
    mistakes = []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return results


def exit_code(error: BaseException) -> int:
    """Return the exit code of a program that an error ends."""
    if isinstance(error, Exit):
        return error.code
    if isinstance(error, ConfigError):
        return WRONG_CONFIG
    if isinstance(error, MissingPackageError):
        return WRONG_CONFIG
    return WRONG_DATA if isinstance(error, DataError) else CRASHED


def nearest(value: int, step: int) -> str:
    """Return a remedy that names the multiples of `step` next to a value."""
    below = value - value % step
    multiples = [below, below + step] if below else [step]
    return f"nearest: {' or '.join(map(str, multiples))}"
