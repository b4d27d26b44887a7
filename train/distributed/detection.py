"""Which process this is, among how many, and where process 0 is to be found.

Each of the three is taken from the first of these that tells it:

1. `distributed.*`, or JAX_COORDINATOR_ADDRESS.
2. The variables of torchrun (and of whoever sets the same), or of SkyPilot.
3. JAX's own detection: Open MPI, Slurm, GKE and Cloud TPU VMs, Kubernetes.

If none of them tells anything, this process is alone. It is an error if something
looks like one of several processes and not enough is known.
"""

import logging
import os
from typing import NamedTuple

from train.config import DistributedConfig
from train.distributed.compat import detect_place
from train.errors import ABORTED, CRASHED, ConfigError, Exit, Mistake

log = logging.getLogger(__name__)

_LAUNCHERS = (  # hosts, the first of them process 0's; count; number
    ("MASTER_ADDR", "WORLD_SIZE", "RANK"),
    ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
)
_PORT = 29500  # torchrun's default
_REMEDY = (
    "give distributed.coordinator_address, distributed.num_processes and "
    "distributed.process_id, or distributed.num_processes=1 for a process alone"
)


class ProcessPlace(NamedTuple):
    """A process among several."""

    address: str  # host:port of process 0
    processes: int
    process: int
    local_process: int | None  # its number on the host, if the host has several


def find_place(config: DistributedConfig) -> ProcessPlace | None:
    """Return which process this is, among how many; None if it is alone.

    Raises:
        ConfigError: keys and variables are not enough, or contradict each other.
        Exit: what JAX asked to find out did not answer, or refused.
    """
    if config.num_processes == 1:
        return None
    address = config.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes, process, local = config.num_processes, config.process_id, None
    if launched := _launcher():
        address = launched.address if address is None else address
        processes = launched.processes if processes is None else processes
        process = launched.process if process is None else process
        local = launched.local_process
    elif None in (address, processes, process) and not _not_in_a_step():
        address, processes, process, local = _ask_jax(
            address, processes, process, config.init_timeout_s
        )
    if processes == 1:
        return None
    if address is None and processes is None and process is None:
        _refuse_one_of_several()
        return None
    if address is None or processes is None or process is None:
        keys = {"coordinator_address": address, "num_processes": processes}
        keys = [key for key, v in (keys | {"process_id": process}).items() if v is None]
        rule = "is needed with the others: one of the three was given or found"
        raise ConfigError([Mistake(f"distributed.{k}", None, rule) for k in keys])
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        rule = "must be host:port of process 0, say 10.0.0.1:8476"
        raise ConfigError([Mistake("distributed.coordinator_address", address, rule)])
    if not 0 <= process < processes:
        rule = f"must be below distributed.num_processes={processes}; both were given "
        rule += "by these keys, or found in the launcher's variables"
        raise ConfigError([Mistake("distributed.process_id", process, rule)])
    return ProcessPlace(
        address, processes, process, local if _one_device_each() else None
    )


def _launcher() -> ProcessPlace | None:
    """Read the variables of launchers that JAX does not know."""
    for hosts, count, number in _LAUNCHERS:
        if {hosts, count, number} <= os.environ.keys():
            port = _number("JAX_COORDINATOR_PORT", _number("MASTER_PORT", _PORT))
            # torchrun itself listens there; what only sets the variables does not.
            port += os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            host = (os.environ[hosts].split() or [""])[0]
            local = _number("LOCAL_RANK") if _several_here("LOCAL_WORLD_SIZE") else None
            return ProcessPlace(
                f"{host}:{port}", _number(count), _number(number), local
            )
    return None


def _ask_jax(
    address: str | None, processes: int | None, process: int | None, timeout_s: int
) -> tuple[str | None, int | None, int | None, int | None]:
    """Ask JAX for what is not known yet, and for the number on this host.

    JAX would give each process under Slurm or Open MPI one GPU, and so leave the
    others of the host idle where there is one process a host.
    """
    try:
        address, processes, process, local = detect_place(
            address, processes, process, timeout_s
        )
    except Exception as error:  # many services are asked, and some may start later
        code = ABORTED if isinstance(error, OSError) else CRASHED
        message = f"the other processes were not found: {error}\nOr {_REMEDY}"
        raise Exit(code, message) from None
    several = _several_here("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return address, processes, process, local[0] if local and several else None


def _not_in_a_step() -> bool:
    """Return, and warn, if this is the shell or the script of a larger Slurm job."""
    env = os.environ
    if "OMPI_COMM_WORLD_SIZE" in env or env.get("SLURM_NTASKS", "1") == "1":
        return False
    # The shell of salloc may be a step, of one task, with the job's SLURM_NTASKS.
    if "SLURM_STEP_NODELIST" in env and env.get("SLURM_STEP_NUM_TASKS") != "1":
        return False
    log.warning(
        "this Slurm job has %s tasks, but srun did not start this process as one of "
        "them: it trains alone. For all: srun python -m train ...",
        env["SLURM_NTASKS"],
    )
    return True


def _refuse_one_of_several() -> None:
    """Refuse to train alone if a variable says that there are other processes."""
    env, reason = os.environ, ""
    if _number("WORLD_SIZE", 1) > 1 and "RANK" in env:
        reason = "MASTER_ADDR is not set, but RANK and WORLD_SIZE are"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        reason = (
            "is one of an Indexed Job, and the others can only be found with the "
            "package kubernetes (pip install 'jax[k8s]') and leave to get and list "
            "pods, services and jobs"
        )
    if reason:
        rule = f"{reason}; {_REMEDY}"
        raise ConfigError([Mistake("distributed.process_id", None, rule)])


def _several_here(*variables: str) -> bool:
    """Return whether a host has several of the processes: `4`, `2(x3)`, `2,1`."""
    counts = next((os.environ[name] for name in variables if name in os.environ), "1")
    return any(part.split("(")[0] != "1" for part in counts.split(","))


def _one_device_each() -> bool:
    """Return whether each process of a host must be given a device of its own here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    single = len(visible.split(",")) == 1 and visible  # srun --gpus-per-task and others
    return not single and "JAX_LOCAL_DEVICE_IDS" not in os.environ


def _number(variable: str, default: int = 0) -> int:
    """Read a variable; raises ConfigError if it is not a number."""
    value = os.environ.get(variable, str(default))
    if not value.isdigit():
        raise ConfigError([Mistake(variable, value, "must be a whole number")])
    return int(value)
