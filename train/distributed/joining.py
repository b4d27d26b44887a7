"""Find the processes of a run, and connect them before JAX is used.

Before JAX connects the processes, they meet at a rendezvous (rendezvous.py) that names
the missing processes; JAX's own timeout aborts without naming them.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from train.config import DistributedConfig
from train.distributed.detection import find_place
from train.distributed.messages import job_secret
from train.distributed.processes import Cluster
from train.distributed.rendezvous import await_processes, join_processes


def join(
    config: DistributedConfig, run: str, on_all_arrived: Callable[[], None]
) -> Cluster:
    """Find the other processes and connect to them.

    Must run before anything asks JAX for a device.

    Args:
        config: overrides what the environment says about the processes.
        run: the run's directory, by which the processes know each other if no launcher
            has handed out a secret.
        on_all_arrived: called once all processes have arrived. From then on they wait
            for each other, and no process may exit alone.

    Raises:
        ConfigError: the config keys and variables are incomplete or contradictory.
        Exit: not all processes arrived in time; the message names the missing ones.
    """
    place = find_place(config)
    if place is None:
        return Cluster()
    address, processes, process, local_process = place
    secret = job_secret(run)
    timeout_s = config.init_timeout_s
    if process == 0:
        await_processes(address, processes, timeout_s, secret)
    else:
        join_processes(address, process, processes, timeout_s, secret)
    on_all_arrived()
    # Rich must ignore mpirun's pseudo-terminal of 80 columns, too narrow for tables.
    os.environ["TTY_COMPATIBLE"] = "0"
    # JAX's SIGTERM handler would replace the one of distributed/preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        processes,
        process,
        local_device_ids=None if local_process is None else [local_process],
        cluster_detection_method="deactivate",
        initialization_timeout=config.init_timeout_s,
        heartbeat_timeout_seconds=config.heartbeat_timeout_s,
    )
    if process:
        _log_warnings_only(process)
    return Cluster(process, processes, config.barrier_timeout_s)


def _log_warnings_only(process: int) -> None:
    """Log only warnings, with this process's number and host; discard stdout."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (open until the program ends)
    sender = f"process {process} on {socket.gethostname()}"
    line_format = f"%(asctime)s %(levelname)s [{sender}] %(message)s"
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter(line_format, "%H:%M:%S"))
