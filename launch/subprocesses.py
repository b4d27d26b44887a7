"""Other programs of this machine, which talk to other machines."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from train.errors import WRONG_CONFIG, Exit

_TIMEOUT_S = 1800.0


def try_call(
    words: Sequence[str],
    timeout_s: float = _TIMEOUT_S,
    cwd: Path | None = None,
    said: bytes = b"",
) -> tuple[int, bytes, str]:
    """Run a command; give its exit code, what it printed, and what it complained of.

    Ctrl-C does not reach it: what it has begun it ends.

    Args:
        words: the command.
        timeout_s: it is killed after these.
        cwd: where it runs.
        said: what it reads.

    Raises:
        Exit: there is no such program.
    """
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            input=said,
            timeout=timeout_s,
            cwd=cwd,
            start_new_session=True,
        )
    except FileNotFoundError:
        wrong = f"{words[0]} is not installed on this machine, or not on the PATH"
        raise Exit(WRONG_CONFIG, wrong) from None
    except subprocess.TimeoutExpired:
        return 1, b"", f"{words[0]} took longer than {timeout_s:.0f} s"
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")
