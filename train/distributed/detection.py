"""Find the number of this process, the process count, and the address of process 0.

Each value is taken from the first of these sources that provides it:

1. The config keys `distributed.*`, or the variable JAX_COORDINATOR_ADDRESS.
2. The variables of torchrun, which other launchers also set, or of SkyPilot.
3. JAX's own detection: Open MPI, Slurm, GKE and Cloud TPU VMs, Kubernetes.

If no source provides any of the three values, and no variable hints at other processes,
this process trains alone. Otherwise ConfigError is raised unless all three are found.
"""

import logging
import os
from typing import NamedTuple

from data.errors import Mistake
from train.config import DistributedConfig
from train.distributed.compat import detect_place
from train.errors import ABORTED, CRASHED, ConfigError, Exit

log = logging.getLogger(__name__)

# Variables with the hosts (process 0's first), the process count, and the number of
# this process.
_LAUNCHERS = (
    ("MASTER_ADDR", "WORLD_SIZE", "RANK"),
    ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
)
_PORT = 29500  # torchrun's default
_REMEDY = (
    "give distributed.coordinator_address, distributed.num_processes and "
    "distributed.process_id, or distributed.num_processes=1 for a process alone"
)


class ProcessPlace(NamedTuple):
    """The number of a process among several, and where it reaches process 0."""

    address: str  # host:port of process 0
    processes: int
    process: int
    local_process: int | None  # number on its host; None: it uses all visible devices


def find_place(config: DistributedConfig) -> ProcessPlace | None:
    """Return the place of this process among all processes; None if it is alone.

    Raises:
        ConfigError: the config keys and variables are incomplete or contradictory.
        Exit: a service that JAX asked for the values did not answer, or refused.
    """
    if config.num_processes == 1:
        return None
    address = config.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes = config.num_processes
    process = config.process_id
    local_process = None
    if launcher_place := _launcher_place():
        address = launcher_place.address if address is None else address
        processes = launcher_place.processes if processes is None else processes
        process = launcher_place.process if process is None else process
        local_process = launcher_place.local_process
    elif None in (address, processes, process) and not _is_outside_slurm_step():
        address, processes, process, local_process = _ask_jax(
            address, processes, process, config.init_timeout_s
        )
    if processes == 1:
        return None
    if address is None and processes is None and process is None:
        _refuse_one_of_several()
        return None
    if address is None or processes is None or process is None:
        values = {"coordinator_address": address, "num_processes": processes}
        values["process_id"] = process
        rule = "is needed with the others: one of the three was given or found"
        missing = [key for key, value in values.items() if value is None]
        raise ConfigError([Mistake(f"distributed.{k}", None, rule) for k in missing])
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        rule = "must be host:port of process 0, say 10.0.0.1:8476"
        raise ConfigError([Mistake("distributed.coordinator_address", address, rule)])
    if not 0 <= process < processes:
        rule = f"must be below distributed.num_processes={processes}; both were given "
        rule += "by these keys, or found in the launcher's variables"
        raise ConfigError([Mistake("distributed.process_id", process, rule)])
    return ProcessPlace(
        address, processes, process, local_process if _needs_one_device() else None
    )


def _launcher_place() -> ProcessPlace | None:
    """Return the place that the variables of launchers unknown to JAX describe."""
    for hosts, count, number in _LAUNCHERS:
        if {hosts, count, number} <= os.environ.keys():
            port = _read_int("JAX_COORDINATOR_PORT", _read_int("MASTER_PORT", _PORT))
            # With this variable, torchrun's own store occupies the port: use the next.
            port += os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            host = (os.environ[hosts].split() or [""])[0]
            has_peers = _shares_host("LOCAL_WORLD_SIZE")
            local_process = _read_int("LOCAL_RANK") if has_peers else None
            return ProcessPlace(
                f"{host}:{port}", _read_int(count), _read_int(number), local_process
            )
    return None


def _ask_jax(
    address: str | None, processes: int | None, process: int | None, timeout_s: int
) -> tuple[str | None, int | None, int | None, int | None]:
    """Return the three values, completed by JAX, and this process's number on its host.

    The number is None if each host has only one process. This process then uses all
    GPUs of its host; under Slurm or Open MPI, JAX alone would assign it only one.
    """
    try:
        address, processes, process, device_ids = detect_place(
            address, processes, process, timeout_s
        )
    except Exception as error:  # OSError: a service may answer a later start
        code = ABORTED if isinstance(error, OSError) else CRASHED
        message = f"the other processes were not found: {error}\nOr {_REMEDY}"
        raise Exit(code, message) from None
    has_peers = _shares_host("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    local_process = device_ids[0] if device_ids and has_peers else None
    return address, processes, process, local_process


def _is_outside_slurm_step() -> bool:
    """Return whether a multi-task Slurm job runs this without srun; warn if so."""
    env = os.environ
    if "OMPI_COMM_WORLD_SIZE" in env or env.get("SLURM_NTASKS", "1") == "1":
        return False
    # salloc may start its shell as a step of one task, with the job's SLURM_NTASKS.
    if "SLURM_STEP_NODELIST" in env and env.get("SLURM_STEP_NUM_TASKS") != "1":
        return False
    log.warning(
        "this Slurm job has %s tasks, but srun did not start this process as one of "
        "them: it trains alone. For all: srun python -m train ...",
        env["SLURM_NTASKS"],
    )
    return True


def _refuse_one_of_several() -> None:
    """Raise ConfigError if a variable says that there are other processes."""
    env = os.environ
    reason = ""
    if _read_int("WORLD_SIZE", 1) > 1 and "RANK" in env:
        reason = "MASTER_ADDR is not set, but RANK and WORLD_SIZE are"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        reason = (
            "is one of an Indexed Job, and the others can only be found with the "
            "package kubernetes (pip install 'jax[k8s]') and permission to get and "
            "list pods, services and jobs"
        )
    if reason:
        rule = f"{reason}; {_REMEDY}"
        raise ConfigError([Mistake("distributed.process_id", None, rule)])


def _shares_host(*variables: str) -> bool:
    """Return whether any host has several processes; Slurm's counts are `2(x3),1`."""
    counts = next((os.environ[name] for name in variables if name in os.environ), "1")
    return any(count.split("(")[0] != "1" for count in counts.split(","))


def _needs_one_device() -> bool:
    """Return whether this process is not yet restricted to its own devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_restricted = len(visible.split(",")) == 1 and visible  # srun restricts it.
    return not is_restricted and "JAX_LOCAL_DEVICE_IDS" not in os.environ


def _read_int(variable: str, default: int = 0) -> int:
    """Return a variable as a number; raise ConfigError if it holds anything else."""
    value = os.environ.get(variable, str(default))
    if not value.isdigit():
        raise ConfigError([Mistake(variable, value, "must be a whole number")])
    return int(value)
