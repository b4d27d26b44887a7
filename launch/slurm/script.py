"""The job script of Slurm: it trains, and decides whether to requeue the job.

The script reads the exit codes of all processes from files, because srun reports only
the highest. It judges the codes as `launch/policy.py` does, requeues its own job if
another start may help, and logs why. Events that Slurm handles itself (a lost node, a
preemption that requeues, scancel) do not count as crashes. The script passes no signals
on, because Slurm sends them to the processes directly.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.storage import is_remote
from launch import gpu_variables as gpu
from launch.config import SlurmCluster
from launch.config.clusters import Code
from launch.host_resources import host_memory_gib, process_cores
from launch.job import Job, export_lines, local_folder, long_options
from launch.job_secret import MAKE_SECRET_LINE, SECRET_VARIABLE
from launch.policy import (
    LAST_SAVE_S,
    NO_RESTART_CODES,
    RESTART_CODES,
    SAME_STEP,
    backoff,
)
from launch.supervisor import ATTEMPTS
from train.errors import CRASHES_AGAIN, STOPPED

SCRIPT = "job.sh"
LOG = "job.log"
STOP = "stop"
_MAX_PAUSES = 32  # after more crashes, the last pause is repeated
_NODE_OPTIONS = {"constraint", "nodelist", "nodefile", "reservation"}


def job_script(job: Job, cluster: SlurmCluster) -> str:
    """Return the text of the job script."""
    sections = [
        ["#!/usr/bin/env bash", *directives(job, cluster)],
        [f"# Trains {job.name}, and starts again until it is done or of no use."],
        export_lines(_gpu_variables(job, cluster)),
        cluster.setup,
        [*_COORDINATOR, MAKE_SECRET_LINE],
        export_lines(job.variables(cluster.code)),
        _command_lines(job, cluster),
        _policy_lines(job, cluster),
        [Path(__file__).with_name("attempt.sh").read_text()],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def script_folder(job: Job) -> str:
    """Return the folder of the script, log and exit codes, which all nodes share."""
    return str(Path.cwd() / local_folder(job.name, job.folder))


def directives(job: Job, cluster: SlurmCluster) -> list[str]:
    """Return the #SBATCH lines; `slurm/checks.py` has checked their values."""
    defaults = {
        "job-name": job.name,
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.processes_per_node,
        "gpus-per-node": cluster.gpus_per_node,
        "cpus-per-task": _cpus_per_task(job, cluster),
        "mem": _memory(job, cluster),
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "signal": f"TERM@{cluster.signal_s}",
        "requeue": True,
        "open-mode": "append",
    }
    return [f"#SBATCH {word}" for word in long_options({**defaults, **cluster.options})]


def _cpus_per_task(job: Job, cluster: SlurmCluster) -> int | None:
    if job.staged_bytes is None or cluster.cpus_per_task is not None:
        return cluster.cpus_per_task
    return process_cores((cluster.gpus_per_node or 1) // cluster.processes_per_node)


def _memory(job: Job, cluster: SlurmCluster) -> str | None:
    if job.staged_bytes is None or cluster.memory is not None:
        return cluster.memory
    processes = cluster.processes_per_node
    return f"{host_memory_gib(job.staged_bytes, job.held_bytes, processes)}G"


def _gpu_variables(job: Job, cluster: SlurmCluster) -> dict[str, str]:
    if cluster.gpus_per_node is None:
        return {}
    values = {**job.cache_variables(), **gpu.job_variables(job.environment)}
    return {name: v for name, v in values.items() if name not in job.environment}


# JAX needs the name of the first node, which runs process 0, and a free port there. The
# port is below 32,768, where the ports begin that Linux assigns to any program. Jobs
# that share a node have different ports unless their ids differ by a multiple of
# 12,000. If the name of the node cannot be resolved, Slurm's NodeAddr is used.
_COORDINATOR = r"""
# Process 0, at a port that no other job on its node has.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if ! getent hosts "$first" >/dev/null &&
	[[ $(scontrol show node --oneliner "$first") =~ NodeAddr=([^ ]+) ]]; then
	first=${BASH_REMATCH[1]}
fi
export JAX_COORDINATOR_ADDRESS=$first:$((20000 + SLURM_JOB_ID % 12000))
""".strip().splitlines()


def _command_lines(job: Job, cluster: SlurmCluster) -> list[str]:
    """Return lines that set the commands as bash arrays, one word on each line."""
    default_python = "python3" if cluster.container_image else sys.executable
    python = cluster.python or default_python
    tasks = cluster.nodes * cluster.processes_per_node
    one_task = {"nodes": 1, "ntasks": 1, "ntasks-per-node": 1, "export": "ALL"}
    all_tasks = {
        "nodes": cluster.nodes,
        "ntasks": tasks,
        "ntasks-per-node": cluster.processes_per_node,
        # srun does not inherit this option from sbatch.
        "cpus-per-task": _cpus_per_task(job, cluster),
        "kill-on-bad-exit": 0,
        "wait": round(LAST_SAVE_S),
        "export": "ALL",
    }
    container = _srun_options(job, cluster)
    return [
        f"tasks={tasks}",
        *_array_lines("srun", ["srun", *long_options({**all_tasks, **container})]),
        *_array_lines("srun_one", ["srun", *long_options({**one_task, **container})]),
        *_array_lines("train", job.command(python, cluster.code)),
        *_array_lines("status", job.status_command(python, cluster.code)),
    ]


def _array_lines(name: str, words: Sequence[str]) -> list[str]:
    return [f"{name}=(", *(f"\t{shlex.quote(word)}" for word in words), ")"]


def _srun_options(job: Job, cluster: SlurmCluster) -> dict[str, Any]:
    """Return srun's options. A container mounts each host path at the same path."""
    if cluster.container_image is None:
        return dict(cluster.srun_options)
    workdir = cluster.workdir or job.workdir
    host_paths = [workdir, script_folder(job)]
    host_paths += [] if is_remote(job.run_dir) else [job.run_dir]
    host_paths += [job.root] if cluster.code is Code.shared else []
    paths = [Path(path) for path in dict.fromkeys(host_paths)]
    outermost = [path for path in paths if not {*paths} & {*path.parents}]
    mounts = [f"{path}:{path}" for path in outermost]
    names = {"JAX_COORDINATOR_ADDRESS", SECRET_VARIABLE, *job.variables(cluster.code)}
    names |= {*_gpu_variables(job, cluster)}
    return {
        "container-image": cluster.container_image,
        "container-mounts": ",".join([*mounts, *cluster.container_mounts]),
        "container-workdir": workdir,
        "container-env": ",".join(sorted(names)),  # these override the image's values
        **cluster.srun_options,
    }


def _policy_lines(job: Job, cluster: SlurmCluster) -> list[str]:
    """Return lines that set the rules of `launch/policy.py` and the paths in bash."""
    folder = script_folder(job)
    num_pauses = min(cluster.max_restarts, _MAX_PAUSES)
    pauses = [round(backoff(n + 1, cluster.backoff_s)) for n in range(num_pauses)]
    values = {
        "folder": shlex.quote(folder),
        "diary": shlex.quote(f"{folder}/{ATTEMPTS}"),
        "stop": shlex.quote(f"{folder}/{STOP}"),
        "exclude": shlex.quote(str(cluster.options.get("exclude") or "")),
        "stopped": STOPPED,
        "crashes_again": CRASHES_AGAIN,
        "same_step": SAME_STEP,
        "max_restarts": cluster.max_restarts,
        "chosen": int(any(map(cluster.options.get, _NODE_OPTIONS))),
        "never_again": f"({' '.join(map(str, NO_RESTART_CODES))})",
        "again": f"({' '.join(map(str, RESTART_CODES))})",
        "pauses": f"({' '.join(map(str, pauses))})",
    }
    return [f"{name}={value}" for name, value in values.items()]
