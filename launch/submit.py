"""Submitting: checked, planned, rendered, kept, and handed to the cluster."""

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from launch import local, skypilot
from launch.archive import archive
from launch.backend import Backend
from launch.config import Action, LaunchConfig, kind_in, schema_of
from launch.config.clusters import Code
from launch.job import (
    ARCHIVE,
    UNPACK,
    Job,
    Rendered,
    control_character_mistakes,
    job_name,
    shell,
)
from launch.kubernetes import gke_gpu, gke_tpu
from launch.plan_check import ALL_UNCHECKED, check_plan
from launch.remote import ssh, tpu_vm
from launch.slurm import backend as slurm
from launch.submissions import (
    Submission,
    folder_to_render,
    keep,
    newest,
    next_number,
    write_files,
)
from launch.subprocesses import ROOT
from train.cli.command import compose, config_yaml
from train.cli.quoting import hydra_text
from train.config import Config
from train.errors import FINISHED, ConfigError, Mistake
from train.identity import run_dir, run_name, training_config
from train.run.folder import run_folder

log = logging.getLogger(__name__)

BACKENDS: Mapping[str, Backend] = {
    "local": local,
    "ssh": ssh,
    "tpu_vm": tpu_vm,
    "slurm": slurm,
    "gke_tpu": gke_tpu,
    "gke_gpu": gke_gpu,
    "skypilot": skypilot,
}
OWN = {f.name for f in dataclasses.fields(LaunchConfig)} - {
    f.name for f in dataclasses.fields(Config)
}
_OF_RESUME = {"action", "force", "run.name", "run.dir"}  # keys that it heeds


def run_directory(config: Any) -> str:
    """Return the run's directory, a local one from the root on."""
    return os.fspath(run_folder(run_dir(training_config(config))))


def submit_job(config: Any, arguments: Sequence[str], workdir: str) -> int:
    """Check, show the plan, render, keep what is submitted, submit.

    `config` was composed of `arguments`, typed in `workdir`: paths begin there. The
    plan comes before the run's directory is read, which may be out of reach.
    """
    kind, cluster, directory = kind_in(arguments), config.cluster, run_directory(config)
    backend = BACKENDS[kind]
    job, _ = _checked(config, _job(config, arguments, workdir), backend)
    _refuse_twice(directory)
    number, typed = next_number(directory), tuple(arguments)
    submission = Submission(
        directory, number, kind=kind, name=job.name, arguments=typed, workdir=workdir
    )
    job = dataclasses.replace(job, folder=os.fspath(submission.folder))
    rendered = backend.render(job, cluster)
    files = {**_files(rendered, cluster), "config.yaml": config_yaml(config)}
    submission = keep(submission, files, ROOT)
    log.info("%s: kept in %s", job.name, submission.folder)
    return backend.submit(job, cluster, rendered, submission)


def render_job(config: Any, arguments: Sequence[str], workdir: str) -> int:
    """Show what would be submitted, with the paths that `submit_job` would use.

    The first line says what the plan did not check, if so. Files go to `output`, or are
    printed; then come the commands.
    """
    backend = BACKENDS[kind_in(arguments)]
    job, unchecked = _checked(config, _job(config, arguments, workdir), backend)
    folder = os.fspath(folder_to_render(run_directory(config)))
    job = dataclasses.replace(job, folder=folder, rendered_to=config.output or ".")
    rendered = backend.render(job, config.cluster)
    if unchecked is not None:
        print(f"# {unchecked}")
    if config.output is not None:
        write_files(epath.Path(config.output), _files(rendered, config.cluster))
    else:
        for name, content in rendered.files.items():
            print(f"# ---- {name}\n{content}")
    for line in rendered.before:
        print(line)
    print(shell(rendered.command))
    return FINISHED


def resume(
    submission: Submission,
    typed: Sequence[str],
    mistakes: Callable[[Any], list[Mistake]],
    force: bool,
) -> int:
    """Submit again what was submitted; warn of all else in `typed`."""
    for word in typed:
        if _key(word) not in _OF_RESUME and word not in submission.arguments:
            why = "action=resume submits what was submitted, as it was"
            log.warning("%s has no effect: %s", _key(word), why)
    config = compose(submission.arguments, "launch", schema_of(submission.kind))
    config = dataclasses.replace(
        config,
        action=Action.submit,
        force=force or config.force,
        run=dataclasses.replace(config.run, dir=submission.run_dir),
    )
    if errors := mistakes(config):
        raise ConfigError(errors)
    return submit_job(config, submission.arguments, submission.workdir)


def _checked(config: Any, job: Job, backend: Backend) -> tuple[Job, str | None]:
    """Make the plan of a job, unless plan_first=false."""
    if not config.plan_first:
        return job, f"No plan was made (plan_first=false): {ALL_UNCHECKED}."
    return check_plan(job, backend.machine(config.cluster), config.force)


def _job(config: Any, arguments: Sequence[str], workdir: str) -> Job:
    """Return what is to run; its folder is not settled yet."""
    if errors := control_character_mistakes(arguments):
        raise ConfigError(errors)
    directory = run_directory(config)
    return Job(
        name=job_name(run_name(training_config(config)), directory),
        run_dir=directory,
        folder="",
        overrides=_for_training(arguments, directory),
        root=str(ROOT),
        workdir=workdir,
        environment=config.cluster.environment,
    )


def _files(rendered: Rendered, cluster: Any) -> dict[str, str | bytes]:
    archived = getattr(cluster, "code", None) is Code.archive  # some kinds lack the key
    if not archived:
        return dict(rendered.files)
    unpack = (ROOT / "launch" / UNPACK).read_bytes()
    return {**rendered.files, ARCHIVE: archive(ROOT), UNPACK: unpack}


def _refuse_twice(directory: str) -> None:
    """Raise ConfigError if the run was submitted and is not over."""
    submission = newest(directory)
    if submission is not None and BACKENDS[submission.kind].alive(submission):
        rule = f"runs, or waits to run, on {submission.kind} as {submission.name}: "
        rule += "action=logs follow=true shows it, action=stop ends it"
        raise ConfigError([Mistake("run.dir", directory, rule)])


def _for_training(arguments: Sequence[str], directory: str) -> tuple[str, ...]:
    """Leave out what is ours; name the run's directory from the root on."""
    passed = [a for a in arguments if _key(a).partition(".")[0] not in OWN]
    passed = [a for a in passed if _key(a) != "run.dir"]
    return (*passed, hydra_text("run.dir", directory))


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0]
