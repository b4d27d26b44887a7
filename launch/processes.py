"""Several processes of one machine: started, waited for, told."""

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.policy import OTHERS_S

log = logging.getLogger(__name__)

_LOOK_S = 0.05


def place(local: int, processes: int, node: int = 0) -> dict[str, str]:
    """Give torchrun's variables of a process of this node; none for one alone."""
    if processes == 1:
        return {}
    numbers = {"RANK": node * processes + local, "LOCAL_RANK": local}
    numbers |= {"LOCAL_WORLD_SIZE": processes}
    return {name: str(number) for name, number in numbers.items()}


class Processes:
    """Those that were started; more may come while signals already do."""

    def __init__(self) -> None:
        """None yet."""
        self._asked: int | None = None
        self._all: list[subprocess.Popen[Any]] = []

    def add(self, command: Sequence[str], **how: Any) -> None:
        """Start one more; `how` is Popen's."""
        self._all.append(subprocess.Popen(command, **how))
        if self._asked is not None:  # while they were started
            self._all[-1].send_signal(self._asked)

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> list[int | None]:
        """Wait for all; once one has ended the others have some time.

        Args:
            meanwhile: called often.

        Returns:
            Exit codes as a shell has them: 134 for an abort.
        """
        patience_s = OTHERS_S
        while None in (codes := [process.poll() for process in self._all]):
            meanwhile()
            if any(code is not None for code in codes):
                patience_s -= _LOOK_S
                if patience_s < 0:
                    log.warning("some do not end after another has: killed")
                    self.tell(signal.SIGKILL)
            time.sleep(_LOOK_S)
        meanwhile()
        return [
            128 - p.returncode if p.returncode < 0 else p.returncode for p in self._all
        ]

    def tell(self, number: int) -> None:
        """Send a signal to all that live, and to those to come."""
        self._asked = number
        for process in self._all:
            if process.poll() is None:
                process.send_signal(number)
