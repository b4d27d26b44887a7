"""`cluster=tpu_vm`: Cloud TPU VMs, one or several slices, supervised by this machine.

The VMs are requested as a queued resource, get this program by scp or as an image, and
are polled over ssh. If the VMs are preempted, they are requested again. When the run is
over, the VMs are deleted, unless `cluster.keep` is true.
"""

from dataclasses import replace

from data.errors import Mistake
from launch.config import TpuVmCluster
from launch.config.clusters import Code
from launch.job import (
    ARCHIVE,
    VARIABLE,
    VARIABLE_RULE,
    Job,
    Rendered,
    long_options,
    shell,
)
from launch.job_secret import SECRET_VARIABLE
from launch.plan_check import Machine, object_store_mistakes, tpu_target
from launch.remote import supervise
from launch.remote.gcloud import TYPES, GcloudError, resource_commands
from launch.remote.queued_resource import describe_states
from launch.remote.run_script import RUN, run_script, verb_line
from launch.remote.supervise import alive, logs, stop, submit  # noqa: F401
from launch.remote.tpu_hosts import (
    FIRST_AND_COUNT,
    STATES,
    copy_to_vms,
    mkdir_line,
    ssh_to_vms,
    start_training_line,
)
from launch.submissions import Submission

SECRETS_REMEDY = "keep it in Secret Manager: cluster.secrets={VARIABLE: its name}"
# The Python of the VMs is 3.10, so each start installs a newer Python. constraints.txt
# of the archive fixes the versions of packages, so a restart does not change them.
_SETUP = (
    "python3 -m pip install --quiet --user uv",
    "python3 -m uv venv --quiet --allow-existing --python 3.13 ~/longhaul/venv",
    f"tar --extract --gzip --file {ARCHIVE} constraints.txt",
    "python3 -m uv pip install --quiet --python ~/longhaul/venv/bin/python "
    f'--constraint constraints.txt "longhaul[tpu,gcs] @ file://$PWD/{ARCHIVE}"',
    "source ~/longhaul/venv/bin/activate",
)


def cluster_mistakes(cluster: TpuVmCluster, run_dir: str) -> list[Mistake]:
    """List the mistakes in the cluster's keys, and in the run's directory."""
    errors = _target_mistakes(cluster.target)
    if not cluster.zone:
        errors.append(Mistake("cluster.zone", None, "is required, say us-east5-b"))
    if cluster.spot and cluster.reserved:
        rule = "exclude each other: use spot machines or reserved ones"
        errors.append(Mistake("cluster.spot, cluster.reserved", True, rule))
    if (cluster.image is None) == (cluster.code is Code.image):
        rule = "goes with cluster.code=image, and only with it"
        errors.append(Mistake("cluster.image", cluster.image, rule))
    for name in cluster.secrets:
        if not VARIABLE.fullmatch(name):
            errors.append(Mistake("cluster.secrets", name, VARIABLE_RULE))
    # With code=shared, all VMs share a file system, so run.dir may be a path.
    shared = cluster.code is Code.shared
    return errors + ([] if shared else object_store_mistakes(run_dir, "tpu_vm"))


def _target_mistakes(name: str | None) -> list[Mistake]:
    target = tpu_target(name)
    if isinstance(target, Mistake):
        return [target]
    if target.family not in TYPES:
        rule = f"{target.family} is available in GKE only: cluster=gke_tpu"
        return [Mistake("cluster.target", name, rule)]
    return []


def machine(cluster: TpuVmCluster) -> Machine:
    """Return the slices as the machine to plan for."""
    return Machine(target=cluster.target)


def render(job: Job, cluster: TpuVmCluster) -> Rendered:
    """Return run.sh, and a script of commands that users can type themselves."""
    remote_job = replace(job, folder=".")  # an archive is put next to run.sh
    python = "python" if cluster.code is Code.image else cluster.python
    command = remote_job.command(python, cluster.code)
    variables = {**job.cache_variables(), **job.variables(cluster.code)}
    last_lines: list[str] = []
    if cluster.image is not None:
        names = [*variables, *cluster.secrets, SECRET_VARIABLE]
        command = _docker_command(cluster.image, job.name, names, command)
        last_lines = [f"sudo docker rm --force {job.name} >/dev/null 2>&1 || true"]
    setup = _SETUP if cluster.code is Code.archive else ()
    script = run_script(
        command,
        variables,
        secrets=_secrets(cluster),
        setup=setup if cluster.setup is None else cluster.setup,
        workdir=job.workdir if cluster.code is Code.shared else None,
        last_lines=last_lines,
    )
    files = {RUN: script, "tpu_vm.sh": _typed_commands(job.name, cluster)}
    return Rendered(files, resource_commands(job.name, cluster)["create"])


def _typed_commands(name: str, cluster: TpuVmCluster) -> str:
    """Return the supervisor's commands, for users who type the commands themselves."""
    gcloud = resource_commands(name, cluster)
    poll = verb_line(name, "poll", FIRST_AND_COUNT)
    interrupt = verb_line(name, "signal", [*FIRST_AND_COUNT, "INT"])
    command_of = {
        "Ask for the machines; once they are ACTIVE, go on": gcloud["create"],
        "Are they?": gcloud["describe"],
        "Make room for the files": ssh_to_vms(name, cluster, mkdir_line(name)),
        "Copy them, from the folder of this file": copy_to_vms(name, cluster),
        "Start training": ssh_to_vms(name, cluster, start_training_line(name)),
        "Does it run?": ssh_to_vms(name, cluster, poll),
        "Let it save and stop": ssh_to_vms(name, cluster, interrupt),
        "Delete the machines": gcloud["delete"],
    }
    pairs = command_of.items()
    return "".join(f"# {title}\n{shell(words)}\n" for title, words in pairs)


def _secrets(cluster: TpuVmCluster) -> list[str]:
    """Return lines of shell that read Secret Manager with the VM's service account."""
    ask = ["gcloud", "secrets", "versions", "access", "latest"]
    lines = []
    for variable, name in cluster.secrets.items():
        words = [*ask, *long_options({"secret": name, "project": cluster.project})]
        lines += [f'{variable}="$({shell(words)})"', f"export {variable}"]
    return lines


def _docker_command(
    image: str, name: str, variables: list[str], command: list[str]
) -> list[str]:
    """Return the words that run a command in a container with all chips of the VM.

    Source: docs.cloud.google.com/tpu/docs/run-in-container.
    """
    sudo = ["sudo", *long_options({"preserve-env": ",".join(variables) or None})]
    flags = [f"--name={name}", "--privileged", "--net=host", "--user=root"]
    flags += [f"--env={variable}" for variable in variables]
    return [*sudo, "docker", "run", "--rm", *flags, image, *command]


def status(submission: Submission) -> list[str]:
    """Describe the queued resource, its supervisor, and its past states."""
    try:
        current = supervise.submitted_hosts(submission).resource.query()
        state = str(current) if current.state else "none: it is over, or not requested"
    except GcloudError as error:
        state = f"unknown, as gcloud failed: {error}"
    states = describe_states(submission.local_folder() / STATES)
    return [f"queued resource: {state}", *supervise.status(submission), *states]
