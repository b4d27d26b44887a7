"""Plan a job before its submission, to check that it fits and can run on the cluster.

`python -m train.plan` runs in a separate process. It plans for the cluster's machine.
If only the number of devices is known, it plans for as many virtual CPU devices.
"""

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from data.errors import Mistake
from data.storage import is_remote
from launch.job import Job
from launch.subprocesses import run_module
from train.errors import (
    DOES_NOT_FIT,
    FINISHED,
    WRONG_CONFIG,
    WRONG_DATA,
    ConfigError,
    Exit,
)
from train.hardware.targets import Target, parse_target

log = logging.getLogger(__name__)


class Machine(NamedTuple):
    """The machine to plan for. If no field is set, no plan is made.

    target: the machine's name in train/hardware/targets.py.
    devices: the number of devices, if their kind is not known.
    variables: environment variables that change compilation, such as XLA_FLAGS.
    """

    target: str | None = None
    devices: int | None = None
    variables: Mapping[str, str] = {}


ALL_UNCHECKED = (
    "the sizes of mesh and batch, the memory of a device, and the memory and cores of "
    "a host were not checked"
)
_REFUSED = {
    DOES_NOT_FIT: "it does not fit",
    WRONG_CONFIG: "its configuration is wrong",
    WRONG_DATA: "its data is missing or damaged",
}


def check_plan(job: Job, machine: Machine, force: bool) -> tuple[Job, str | None]:
    """Print the plan; return the job with the planned host memory, and a warning.

    The warning is a sentence that says what was not checked, or None.

    Raises:
        Exit: the plan ended with DOES_NOT_FIT, WRONG_CONFIG or WRONG_DATA, and `force`
            is False.
    """
    if machine == Machine():
        why = "the keys of the cluster do not say which devices there are"
        return job, f"No plan was made, because {why}: {ALL_UNCHECKED}."
    arguments = [*job.overrides, "runtime.platform=cpu"]
    folder = f"plans/{job.name}"
    if machine.target is not None:
        arguments += [f"output={folder}", f"target={machine.target}"]
    else:
        arguments.append(f"runtime.cpu_devices={machine.devices}")
    options = {"stdout": sys.stderr, "cwd": job.workdir}
    code = run_module("train.plan", arguments, machine.variables, **options).returncode
    if code in _REFUSED:
        why = f"the plan says that {_REFUSED[code]}"
        if not force:
            raise Exit(code, f"Refused: {why}. To submit it anyway, use force=true")
        log.warning("%s; submitting it anyway (force=true)", why)
        return job, f"With force=true this goes on, although {why}."
    if code != FINISHED:
        unchecked = f"The plan could not be made (exit code {code}): {ALL_UNCHECKED}."
        log.warning(unchecked)
        return job, unchecked
    if machine.target is None:
        unchecked = "The plan was made for devices of an unknown kind: the memory of a "
        unchecked += "device, and the memory and cores of a host were not checked."
        return job, unchecked
    plan = json.loads((Path(job.workdir) / folder / "plan.json").read_text())
    staged_bytes = plan["host_save"]["bytes"]
    held_bytes = plan["host_held_bytes"]
    return replace(job, staged_bytes=staged_bytes, held_bytes=held_bytes), None


def tpu_target(name: str | None) -> Target | Mistake:
    """Return the target that `cluster.target` names, or the mistake in it."""
    key = "cluster.target"
    if name is None:
        return Mistake(key, None, "is required: v6e-8, or v5p-512x4 for 4 slices")
    try:
        target = parse_target(name)
    except ConfigError as error:
        return error.mistakes[0]._replace(key=key)
    if target.platform != "tpu":
        return Mistake(key, name, "is not a TPU. Use cluster=gke_gpu or slurm")
    return target


def object_store_mistakes(run_dir: str, kind: str) -> list[Mistake]:
    """List a mistake if the run's directory is not in an object store."""
    if is_remote(run_dir):
        return []
    rule = f"must lie where the hosts of cluster={kind} and this machine both see it: "
    rule += "give run.dir=gs://bucket/runs/name, or s3://"
    return [Mistake("run.dir", run_dir, rule)]
