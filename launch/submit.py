"""Submit a run: check, plan, render and record it, and hand it to the cluster."""

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from data.errors import Mistake
from data.program import FOLDER, ROOT, own_file
from launch import local, skypilot
from launch.archive import make_archive
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
    newest_submission,
    next_number,
    require_submission,
    write_files,
    write_submission,
)
from train.cli.command import compose, config_yaml
from train.cli.flags import key_of
from train.cli.quoting import hydra_text
from train.config import Config
from train.errors import FINISHED, ConfigError, writing
from train.identity import run_dir, run_name
from train.masking import holds_secret
from train.own_parts import sections_like
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
LAUNCH_KEYS = {f.name for f in dataclasses.fields(LaunchConfig)} - {
    f.name for f in dataclasses.fields(Config)
}
# The keys that action=resume reads from its own command line.
_RESUME_KEYS = {"action", "force", "json", "run.name", "run.dir"}


def resolved_run_dir(config: Any) -> str:
    """Return the run's directory; a local path is made absolute."""
    return os.fspath(run_folder(run_dir(config.plain())))


def submit_job(config: Any, arguments: Sequence[str], workdir: str) -> int:
    """Check, plan, render, record and submit a run; return the exit code.

    `config` was composed from `arguments`, which the user typed in the folder
    `workdir`. Relative paths start there. The run's directory may be unreachable, so it
    is read only after the plan. With `config.json`, one JSON object is printed to
    stdout: after the submission, or after the run if this process supervises it.
    """
    directory = resolved_run_dir(config)
    kind = kind_in(arguments)
    cluster = config.cluster
    backend = BACKENDS[kind]
    job, unchecked = _with_plan(config, _job(config, arguments, workdir), backend)
    _refuse_second_submission(directory)
    submission = Submission(
        directory,
        number=next_number(directory),
        kind=kind,
        name=job.name,
        arguments=tuple(arguments),
        workdir=workdir,
        run_name=run_name(config.plain()),
    )
    job = dataclasses.replace(job, folder=os.fspath(submission.folder))
    rendered = _render(backend, job, cluster)
    files = {**_files_to_write(rendered, cluster), "config.yaml": config_yaml(config)}
    submission = write_submission(submission, files, ROOT)
    log.info("%s: recorded in %s", job.name, submission.folder)
    if not config.json:
        return backend.submit(job, cluster, rendered, submission)
    with contextlib.redirect_stdout(sys.stderr):
        code = backend.submit(job, cluster, rendered, submission)
    values = {**dataclasses.asdict(rendered), "unchecked": unchecked, "exit_code": code}
    print(require_submission(directory).as_json(**values))
    return code


def render_job(config: Any, arguments: Sequence[str], workdir: str) -> int:
    """Show what `submit_job` would submit, with the paths of the next submission.

    If the plan left something unchecked, the first line says so. Files are written to
    `config.output`, or printed if it is null. The commands are printed last. With
    `config.json`, one JSON object with all of this is printed instead.
    """
    kind = kind_in(arguments)
    backend = BACKENDS[kind]
    job, unchecked = _with_plan(config, _job(config, arguments, workdir), backend)
    folder = os.fspath(folder_to_render(resolved_run_dir(config)))
    job = dataclasses.replace(job, folder=folder, rendered_to=config.output or ".")
    rendered = _render(backend, job, config.cluster)
    if config.output is not None:
        files = _files_to_write(rendered, config.cluster)
        with writing("output", config.output):
            write_files(epath.Path(config.output), files)
    if config.json:
        values = {
            "run_name": run_name(config.plain()),
            "run_dir": job.run_dir,
            "kind": kind,
            "name": job.name,
            "folder": folder,
            **dataclasses.asdict(rendered),
            "unchecked": unchecked,
        }
        print(json.dumps(values))
        return FINISHED
    if unchecked is not None:
        print(f"# {unchecked}")
    if config.output is None:
        for name, content in rendered.files.items():
            print(f"# ---- {name}\n{content}")
    for line in rendered.preparation:
        print(line)
    print(shell(rendered.command))
    return FINISHED


def resume(
    submission: Submission,
    overrides: Sequence[str],
    list_mistakes: Callable[[Any], list[Mistake]],
    typed: LaunchConfig,
) -> int:
    """Repeat a recorded submission; warn about `overrides` that have no effect.

    `typed` is the config of this command line. Only its `force`, its `json` and the
    added parts of its sections are used.
    """
    for word in overrides:
        if key_of(word) not in _RESUME_KEYS and word not in submission.arguments:
            why = "action=resume repeats the recorded submission unchanged"
            log.warning("%s has no effect: %s", key_of(word), why)
    schema = sections_like(schema_of(submission.kind), typed)
    config = compose(submission.arguments, "launch", schema)
    config = dataclasses.replace(
        config,
        action=Action.submit,
        force=typed.force or config.force,
        json=typed.json,
        run=dataclasses.replace(config.run, dir=submission.run_dir),
    )
    if errors := list_mistakes(config):
        raise ConfigError(errors)
    return submit_job(config, submission.arguments, submission.workdir)


def _with_plan(config: Any, job: Job, backend: Backend) -> tuple[Job, str | None]:
    """Return the job and warning of `check_plan`, or a warning if plan_first=false."""
    if not config.plan_first:
        return job, f"No plan was made (plan_first=false): {ALL_UNCHECKED}."
    return check_plan(job, backend.machine(config.cluster), config.force)


def _job(config: Any, arguments: Sequence[str], workdir: str) -> Job:
    """Return the job without its folder, which is chosen later."""
    if errors := control_character_mistakes(arguments):
        raise ConfigError(errors)
    directory = resolved_run_dir(config)
    return Job(
        name=job_name(run_name(config.plain()), directory),
        run_dir=directory,
        folder="",
        overrides=_training_overrides(arguments, directory),
        root=str(ROOT),
        workdir=workdir,
        environment=config.cluster.environment,
    )


def _render(backend: Backend, job: Job, cluster: Any) -> Rendered:
    """Render a job; raise ConfigError if a preset has brought a secret into a file."""
    rendered = backend.render(job, cluster)
    rule = "would hold a secret. Leave it out of the cluster's preset; "
    rule += backend.SECRETS_REMEDY
    mistakes = [
        Mistake(name, "(not shown)", rule)
        for name, text in rendered.files.items()
        if holds_secret(text)
    ]
    if mistakes:
        raise ConfigError(mistakes)
    return rendered


def _files_to_write(rendered: Rendered, cluster: Any) -> dict[str, str | bytes]:
    # cluster=local has no key `code`.
    if getattr(cluster, "code", None) is not Code.archive:
        return dict(rendered.files)
    unpacker = (FOLDER / "launch" / UNPACK).read_bytes()
    return {**rendered.files, ARCHIVE: make_archive(ROOT, own_file()), UNPACK: unpacker}


def _refuse_second_submission(directory: str) -> None:
    """Raise ConfigError if the run's last submission is still running or waiting."""
    submission = newest_submission(directory)
    if submission is not None and BACKENDS[submission.kind].alive(submission):
        rule = f"runs, or waits to run, on {submission.kind} as {submission.name}: "
        rule += "action=logs follow=true shows it, action=stop ends it"
        raise ConfigError([Mistake("run.dir", directory, rule)])


def _training_overrides(arguments: Sequence[str], directory: str) -> tuple[str, ...]:
    """Return the overrides for training, with the run's absolute directory."""
    passed = [a for a in arguments if key_of(a).partition(".")[0] not in LAUNCH_KEYS]
    passed = [a for a in passed if key_of(a) != "run.dir"]
    return (*passed, hydra_text("run.dir", directory))
