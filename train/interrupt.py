"""Requests to stop: a preemption notice (SIGTERM) or a person (Ctrl-C)."""

import signal
from types import FrameType

import jax

from train.exits import PREEMPTED, STOPPED


class Interrupt:
    """Notes the first request; the loop acts on it between steps.

    A second Ctrl-C ends the program at once.
    """

    def __init__(self) -> None:
        """Take over SIGTERM and SIGINT."""
        self._code: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._code == STOPPED:
                raise KeyboardInterrupt
            self._code = STOPPED
        else:
            self._code = PREEMPTED

    def code(self) -> int | None:
        """Give the exit code asked for; over several processes the one agreed on."""
        if jax.process_count() == 1:
            return self._code
        from jax.experimental import multihost_utils

        codes = multihost_utils.process_allgather(self._code or 0)
        return int(codes.max()) or None
