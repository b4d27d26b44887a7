"""`cluster=skypilot`: a managed job of SkyPilot, on any of its clouds.

SkyPilot restarts the job when its machines are lost, and after the exit codes
RESTART_CODES. launch/node.py counts crashes, and exits with such a code if the run may
start again. A file in the run's directory asks a running job to stop, because `sky jobs
cancel` takes the machines away without waiting for a save. `sky jobs cancel` is used
only for a job that does not run. Each node runs one process, which uses all its GPUs.
"""

import json
import logging
import os
import re
import sys
import time
from dataclasses import replace
from typing import Any

from etils import epath

from data.errors import Mistake
from data.storage import is_remote
from launch import gpu_variables as gpu
from launch.config import SkypilotCluster
from launch.config.clusters import Code
from launch.job import ARCHIVE, UNPACK, VARIABLE, Job, Rendered, shell, start_words
from launch.job_secret import MAKE_SECRET_LINE, SECRET_VARIABLE, secret_variable
from launch.manifest import merge_values, to_yaml
from launch.node import STOP, node_command
from launch.plan_check import Machine, object_store_mistakes
from launch.policy import RESTART_CODES
from launch.submissions import Submission
from launch.subprocesses import ask_tool, run_tool
from train.errors import CRASHED, FINISHED, Exit

log = logging.getLogger(__name__)

FILE = "task.yaml"
PYTHON = "python3"
SECRETS_REMEDY = (
    "keep it in your environment, and name that: "
    "cluster.secrets={WANDB_API_KEY: WANDB_API_KEY}"
)
_INSTALL_WORDS = re.compile(r"\b(jax|longhaul|uv|pip|conda|requirements)\b")
_OVER = ("SUCCEEDED", "CANCELLED", "FAILED")  # prefixes of states, such as FAILED_SETUP
_POLL_S = 10.0


def cluster_mistakes(cluster: SkypilotCluster, run_dir: str) -> list[Mistake]:
    """List the mistakes in the cluster's keys, and in the run's directory."""
    errors = []
    if cluster.region is not None and cluster.cloud is None:
        rule = "needs cluster.cloud too"
        errors.append(Mistake("cluster.region", cluster.region, rule))
    if cluster.code is Code.shared:
        rule = "must be archive or image: the machines do not share files with this one"
        errors.append(Mistake("cluster.code", "shared", rule))
    if cluster.code is Code.image and cluster.image is None:
        rule = "is needed with cluster.code=image: docker:host/name:tag"
        errors.append(Mistake("cluster.image", None, rule))
    if not (cluster.accelerators or cluster.image or cluster.setup or cluster.merge):
        rule = "is needed, say H100:8, with JAX in cluster.image or installed by "
        rule += "cluster.setup=[pip install 'jax[cuda13]']; CPUs need image or setup"
        errors.append(Mistake("cluster.accelerators", None, rule))
    for name in (*cluster.secrets, *cluster.secrets.values()):
        if not VARIABLE.fullmatch(name):
            rule = "must map the run's variables to variables of your environment: "
            rule += "cluster.secrets={WANDB_API_KEY: WANDB_API_KEY}"
            errors.append(Mistake("cluster.secrets", "(not shown)", rule))
    return [*errors, *object_store_mistakes(run_dir, "skypilot")]


def machine(cluster: SkypilotCluster) -> Machine:
    """Return the nodes; an empty `Machine` unless accelerators are like H100:8."""
    name, _, count = (cluster.accelerators or "").partition(":")
    if not name or not (count or "1").isdigit():
        return Machine()
    kind = name.lower().partition("-")[0]
    return gpu.machine_of(kind, int(count or 1), cluster)


def render(job: Job, cluster: SkypilotCluster) -> Rendered:
    """Return the task file, and the command that launches it."""
    document = merge_values(_task(job, cluster), cluster.merge)
    pairs = cluster.secrets.items()
    lines = [f'export {name}="${source}"' for name, source in pairs if name != source]
    lines += [MAKE_SECRET_LINE] * (cluster.nodes > 1)
    command = _launch_command(job.name, cluster, job.rendered_to or job.folder)
    return Rendered({FILE: to_yaml(document)}, command, lines)


def _launch_command(name: str, cluster: SkypilotCluster, folder: str) -> list[str]:
    """Return the command; `sky` reads the values of secrets from its environment."""
    workdir_flags = ["--workdir", folder] if cluster.code is Code.archive else []
    names = [*cluster.secrets, *[SECRET_VARIABLE] * (cluster.nodes > 1)]
    secret_flags = [word for name in names for word in ("--secret", name)]
    words = ["sky", "jobs", "launch", "--name", name, "--yes", "--detach-run"]
    return [*words, *workdir_flags, *secret_flags, f"{folder}/{FILE}"]


def _task(job: Job, cluster: SkypilotCluster) -> dict[str, Any]:
    resources = {
        "accelerators": cluster.accelerators,
        "infra": "/".join(filter(None, (cluster.cloud, cluster.region))),
        "use_spot": cluster.spot,
        "image_id": cluster.image,
        "job_recovery": {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": sorted(RESTART_CODES),
        },
    }
    uses_gpus = not (cluster.accelerators or "tpu").lower().startswith("tpu")
    node_prefix = node_command(
        start_words("launch.node", PYTHON, cluster.code),
        folder=job.folder,
        max_restarts=cluster.max_restarts,
        backoff_s=cluster.backoff_s,
    )
    local_job = replace(job, folder=".")  # the archive is in the working directory
    run = shell(local_job.command(PYTHON, cluster.code, node_prefix))
    task = {
        "name": job.name,
        "num_nodes": cluster.nodes,
        "resources": {key: value for key, value in resources.items() if value},
        "envs": {
            **(gpu.job_variables(job.environment) if uses_gpus else {}),
            **(job.cache_variables() if cluster.accelerators else {}),
            **job.variables(cluster.code),
        },
        # --secret sets the values.
        "secrets": dict.fromkeys(
            [*cluster.secrets, *[SECRET_VARIABLE] * (cluster.nodes > 1)], None
        ),
        "setup": "".join(f"{line}\n" for line in cluster.setup),
        "run": f'export NODE_RANK="$SKYPILOT_NODE_RANK"\n{run}\n',
    }
    return {key: value for key, value in task.items() if value}


def submit(
    job: Job, cluster: SkypilotCluster, rendered: Rendered, submission: Submission
) -> int:
    """Launch the job from a local folder, after copying remote files there."""
    folder = submission.local_folder()
    for name in (ARCHIVE, UNPACK, FILE):
        source = submission.folder / name
        if is_remote(submission.run_dir) and source.exists():
            source.copy(epath.Path(folder) / name, overwrite=True)
    submission.with_handle(name=job.name)
    sources = cluster.secrets.values()
    if missing := [name for name in sources if name not in os.environ]:
        raise Exit(CRASHED, f"not set in this environment: {', '.join(missing)}")
    if cluster.image is None and not _INSTALL_WORDS.search(" ".join(cluster.setup)):
        log.warning(
            "nothing seems to install jax there: give cluster.image, or cluster.setup="
            '[pip install "jax[cuda13]" ...]'
        )
    secrets = {name: os.environ[source] for name, source in cluster.secrets.items()}
    secrets |= secret_variable(cluster.nodes)
    env = {**os.environ, **secrets}  # `sky` reads secret values from here
    command = _launch_command(job.name, cluster, str(folder))
    # Its output is no result of this command: stdout may be for one JSON object.
    ask_tool(command, env=env, capture_output=False, stdout=sys.stderr.fileno())
    return FINISHED


def alive(submission: Submission) -> bool:
    """Return whether the job is running, or waiting to run."""
    return not _is_over(_newest_job(submission))


def status(submission: Submission) -> list[str]:
    """Describe the job's state in SkyPilot, and why the job waits."""
    job = _newest_job(submission)
    if "job_id" not in job:
        return ["SkyPilot knows no such job"]
    region = job.get("infra") or job.get("region") or ""
    resources = job.get("cluster_resources") or job.get("resources") or ""
    lines = [f"managed job {job['job_id']}: {job['status']}"]
    lines += [f"on {resources} {region}".rstrip()] if resources not in ("", "-") else []
    if job.get("recovery_count"):
        lines.append(f"recovered {job['recovery_count']} times")
    return lines + [job[why] for why in ("details", "failure_reason") if job.get(why)]


def logs(submission: Submission, follow: bool) -> int:
    """Print the run's output; return the code of `sky jobs logs` (100: job failed)."""
    flags = ["--follow" if follow else "--no-follow", "--tail", "0"]
    words = ["sky", "jobs", "logs", "--name", submission.name, *flags]
    return run_tool(words, capture_output=False).returncode


def stop(submission: Submission) -> int:
    """Stop the run after a save, and wait until its job has ended."""
    stop_requested = False
    while not _is_over(job := _newest_job(submission)):
        if not stop_requested and job["status"] == "RUNNING":
            (submission.folder / STOP).write_text("")
            log.info("asked the run to save and stop")
        elif not stop_requested:
            ask_tool(["sky", "jobs", "cancel", "--name", submission.name, "--yes"])
        stop_requested = True
        time.sleep(_POLL_S)
    return FINISHED


def _is_over(job: dict[str, Any]) -> bool:
    return job.get("status", "FAILED").startswith(_OVER)


def _newest_job(submission: Submission) -> dict[str, Any]:
    """Return the newest job with the submission's name; {} if there is none."""
    output = ask_tool(["sky", "jobs", "queue", "--all", "--output", "json"])
    # SkyPilot may print other text before the JSON.
    start = min((i for c in "[{" if (i := output.find(c)) >= 0), default=len(output))
    jobs = json.loads(output[start:] or "[]")
    jobs = jobs if isinstance(jobs, list) else jobs.get("jobs", [])
    matches = [job for job in jobs if job.get("job_name") == submission.name]
    return max(matches, key=lambda job: job["job_id"], default={})
