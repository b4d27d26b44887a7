"""Hand out a secret to the processes of a job, by which they know each other.

The secret reaches the processes by an environment variable. It is made anew for each
attempt. It is never on a command line or in a file of the run: scripts that are
recorded make it when they run. Without the variable, the run's directory takes the
secret's place (`train/distributed/messages.py`).
"""

import secrets

from train.distributed.messages import SECRET_VARIABLE

SECRET_FILE = "job_secret"  # on the hosts of ssh and tpu_vm, next to run.sh
# A line of shell for scripts of which one process starts all others.
MAKE_SECRET_LINE = (
    f"export {SECRET_VARIABLE}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
)


def new_secret() -> str:
    """Return a new secret of 128 bits, as hexadecimal digits."""
    return secrets.token_hex(16)


def secret_variable(processes: int) -> dict[str, str]:
    """Return the variable with a new secret; none for a single process."""
    return {SECRET_VARIABLE: new_secret()} if processes > 1 else {}
