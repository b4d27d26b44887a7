"""`cluster=slurm`: one sbatch job that requeues itself.

Slurm's own commands submit, query and stop the job. The machine that submits must see
the folder of the script (`script_folder`) under the same path as the nodes.
"""

import logging
import time
from pathlib import Path

from launch import gpu_variables as gpu
from launch.config import SlurmCluster
from launch.host_resources import warn_of_short_notice
from launch.job import Job, Rendered, shell
from launch.plan_check import Machine
from launch.slurm.checks import cluster_mistakes as cluster_mistakes
from launch.slurm.script import LOG, SCRIPT, STOP, job_script, script_folder
from launch.slurm.squeue import QueuedJob
from launch.submissions import Submission
from launch.subprocesses import ask_tool
from launch.supervisor import ATTEMPTS, describe_attempts
from train.errors import FINISHED

log = logging.getLogger(__name__)

SECRETS_REMEDY = (
    "set it in the environment that you type this command in: sbatch passes that on"
)
_POLL_S = 1.0
_ASK_AGAIN_S = 60.0  # the first signal is lost if no process ran yet


def machine(cluster: SlurmCluster) -> Machine:
    """Return the GPU nodes; an empty `Machine` if the nodes have only CPUs."""
    if cluster.gpus_per_node is None:
        return Machine()
    return gpu.machine_of(cluster.gpu, cluster.gpus_per_node, cluster)


def render(job: Job, cluster: SlurmCluster) -> Rendered:
    """Return the job script, and the sbatch command that submits it."""
    folder = script_folder(job)
    # sbatch would replace %j in a path by the job's number.
    output = f"{folder}/{LOG}".replace("%", "%%")
    command = ["sbatch", "--parsable", f"--chdir={cluster.workdir or job.workdir}"]
    source_folder = job.rendered_to or folder
    command += [f"--output={output}", f"{source_folder}/{SCRIPT}"]
    mkdir = shell(["mkdir", "-p", folder])  # sbatch does not create the folder
    return Rendered({SCRIPT: job_script(job, cluster)}, command, [mkdir])


def submit(
    job: Job, cluster: SlurmCluster, rendered: Rendered, submission: Submission
) -> int:
    """Submit the script with sbatch."""
    source = "cluster.signal_s: before a time limit Slurm leaves"
    warn_of_short_notice(job, cluster.signal_s, source)
    folder = Path(script_folder(job))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCRIPT).write_text(rendered.files[SCRIPT])
    submission = submission.with_handle(folder=str(folder))
    number, _, federation = ask_tool(rendered.command).strip().partition(";")
    submission.with_handle(job=number, cluster=federation)
    print(f"job {number}; action=status shows its state, action=logs its output")
    return FINISHED


def alive(submission: Submission) -> bool:
    """Return whether the job is running, or waiting to run."""
    return QueuedJob(submission.handle).state() is not None


def status(submission: Submission) -> list[str]:
    """Describe the job's state, why the job waits, and how its attempts ended."""
    diary = Path(submission.handle["folder"]) / ATTEMPTS
    return [*QueuedJob(submission.handle).describe(), *describe_attempts(diary)]


def logs(submission: Submission, follow: bool) -> int:
    """Print the output of the script and the processes."""
    file = Path(submission.handle["folder"]) / LOG
    job = QueuedJob(submission.handle)
    offset = 0
    over = not follow
    checked_at = 0.0
    while True:
        if follow and time.monotonic() - checked_at > 5 * _POLL_S:
            over = job.state() is None
            checked_at = time.monotonic()
        if file.exists():
            with file.open("rb") as log_file:
                log_file.seek(offset)
                print(log_file.read().decode(errors="replace"), end="", flush=True)
                offset = log_file.tell()
        if over:
            return FINISHED
        time.sleep(_POLL_S / 4)


def stop(submission: Submission) -> int:
    """Stop the run after a save, or cancel it in the queue; wait until it has ended.

    A file `stop` keeps the script from starting again. Slurm sends signals directly to
    the processes. Only the first is SIGINT, because a second SIGINT would end the
    processes before the save; later ones are SIGTERM.
    """
    (Path(submission.handle["folder"]) / STOP).touch()
    job = QueuedJob(submission.handle)
    asked_at = None
    while (state := job.state()) is not None:
        now = time.monotonic()
        if state == "PENDING":
            job.cancel()
        elif state == "RUNNING" and asked_at is None:
            log.info("asked job %s to save and stop", job.number)
            job.cancel("INT")
            asked_at = now
        elif state == "RUNNING" and now - (asked_at or now) > _ASK_AGAIN_S:
            job.cancel("TERM")
            asked_at = now
        time.sleep(_POLL_S)
    return FINISHED
