"""`python -m launch cluster=...`: the command line of training, on a cluster.

It takes all keys of `python -m train`, and its own: `action=`, `cluster=`, `force=`;
what is not its own travels, word for word. Exit codes: those of the run where it is
kept going from here (local, ssh, tpu_vm), else 0 once it is submitted; 4, 65 and 78 if
the plan says that it is of no use.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import local, skypilot
from launch.archive import archive_files
from launch.backend import Backend
from launch.config import Action, Code, LaunchConfig, kind_in, kind_of, schema_of
from launch.job import (
    Job,
    control_character_mistakes,
    environment_mistakes,
    job_name,
    shell,
)
from launch.kubernetes import gke_gpu, gke_tpu
from launch.plan_check import check_plan
from launch.remote import ssh, tpu_vm
from launch.slurm import backend as slurm
from launch.submissions import Submission, keep, newest, next_number
from launch.subprocesses import ROOT, run_module
from train.cli.command import compose, run_command, to_yaml
from train.cli.flags import parse_flags
from train.cli.quoting import hydra_text
from train.cli.rules import validate
from train.config import Config
from train.errors import FINISHED, ConfigError, Mistake
from train.identity import of_training, run_dir, run_name
from train.run.storage import run_folder

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


def main(config: Any) -> int:
    """Carry out `action`."""
    if config.action in (Action.submit, Action.render):
        flags = parse_flags(sys.argv[1:])
        if flags.config_dir or flags.config_name:
            rule = "stays here: presets that travel lie in configs/, or are keys"
            raise ConfigError([Mistake("--config-dir, --config-name", "", rule)])
        return _submit(config, flags.overrides, str(Path.cwd()))
    submission = newest(_directory(config))
    if config.action is Action.resume:
        return _resume(submission, config.force)
    backend = BACKENDS[submission.kind]
    if config.action is Action.logs:
        return backend.logs(submission, config.follow)
    if config.action is Action.stop:
        return backend.stop(submission)
    return _status(submission)


def mistakes(config: Any) -> list[Mistake]:
    """List what is wrong, with the keys of training too."""
    found = validate(config)
    if config.cluster.max_restarts < 0:
        rule = "must not be negative; 0 is never again"
        found.append(Mistake("cluster.max_restarts", config.cluster.max_restarts, rule))
    if config.cluster.backoff_s < 0:
        rule = "must not be negative"
        found.append(Mistake("cluster.backoff_s", config.cluster.backoff_s, rule))
    if config.follow and config.action is not Action.logs:
        found.append(Mistake("follow", True, "goes with action=logs only"))
    if config.output and config.action is not Action.render:
        found.append(Mistake("output", config.output, "goes with action=render only"))
    if config.action in (Action.submit, Action.render):
        backend = BACKENDS[kind_of(config.cluster)]
        variables = config.cluster.environment
        found += environment_mistakes(variables, backend.SECRETS_REMEDY)
        found += backend.mistakes(config.cluster, _directory(config))
    return found


def _submit(config: Any, arguments: Sequence[str], workdir: str) -> int:
    """Check, render, show the plan, keep what was submitted, submit.

    Args:
        config: of `python -m launch`.
        arguments: that it was composed of.
        workdir: where they were typed: relative paths begin there.
    """
    if wrong := control_character_mistakes(arguments):
        raise ConfigError(wrong)
    kind, cluster, directory = kind_in(arguments), config.cluster, _directory(config)
    backend = BACKENDS[kind]
    rendering = config.action is Action.render
    number = 1 if rendering else next_number(directory)  # asks the store
    submission = Submission(directory, number, kind, "", tuple(arguments), workdir)
    job = Job(
        name=job_name(run_name(of_training(config)), directory),
        run_dir=directory,
        folder=(config.output or ".") if rendering else os.fspath(submission.folder),
        overrides=_for_training(arguments, directory),
        root=str(ROOT),
        workdir=workdir,
        environment=cluster.environment,
    )
    rendered = backend.render(job, cluster)
    files: dict[str, str | bytes] = {**rendered.files}
    if getattr(cluster, "code", None) is Code.archive:  # not all kinds have the key
        files |= archive_files(ROOT)
    if rendering:
        return _show(files, rendered.command, config.output)
    _refuse_twice(directory)
    if config.plan_first:
        check_plan(job, backend.machine(cluster), config.force)
    submission = dataclasses.replace(submission, name=job.name)
    submission = keep(submission, {**files, "config.yaml": to_yaml(config)}, ROOT)
    log.info("%s: kept in %s", job.name, submission.folder)
    return backend.submit(job, cluster, rendered, submission)


def _resume(submission: Submission, force: bool) -> int:
    """Submit again what was submitted."""
    config = compose(submission.arguments, "launch", schema_of(submission.kind))
    config = dataclasses.replace(
        config,
        action=Action.submit,
        force=force or config.force,
        run=dataclasses.replace(config.run, dir=submission.run_dir),
    )
    if wrong := mistakes(config):
        raise ConfigError(wrong)
    return _submit(config, submission.arguments, submission.workdir)


def _refuse_twice(directory: str) -> None:
    """Refuse to submit what was submitted and is not over.

    Raises:
        ConfigError: saying what to do instead.
    """
    if next_number(directory) == 1:
        return
    submission = newest(directory)
    if BACKENDS[submission.kind].alive(submission):
        rule = f"runs, or waits to run, on {submission.kind} as {submission.name}: "
        rule += "action=logs follow=true shows it, action=stop ends it"
        raise ConfigError([Mistake("run.dir", directory, rule)])


def _status(submission: Submission) -> int:
    """Print what the cluster knows of the job, and what the run knows of itself."""
    print(f"{submission.name}   submitted {submission.time} to {submission.kind}")
    for line in BACKENDS[submission.kind].status(submission):
        print(line)
    sys.stdout.flush()
    if (submission.folder.parent.parent / "config.yaml").exists():
        return run_module(
            "train.status", [hydra_text("run.dir", submission.run_dir)]
        ).returncode
    print("the run has not begun yet")
    return FINISHED


def _show(
    files: Mapping[str, str | bytes], command: Sequence[str], output: str | None
) -> int:
    """Write what would be submitted into a folder, or print it; and the command."""
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        if output is not None:
            folder = Path(output)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        elif isinstance(content, str):
            print(f"# ---- {name}\n{content}")
    print(shell(command))
    return FINISHED


def _for_training(arguments: Sequence[str], directory: str) -> tuple[str, ...]:
    """Leave out what is ours; name the run's directory from the root on."""

    def key(argument: str) -> str:
        return argument.lstrip("+~").partition("=")[0]

    passed = [a for a in arguments if key(a) != "run.dir"]
    passed = [a for a in passed if key(a).partition(".")[0] not in OWN]
    return (*passed, hydra_text("run.dir", directory))


def _directory(config: Any) -> str:
    return os.fspath(run_folder(run_dir(of_training(config))))


if __name__ == "__main__":
    kind = kind_in(sys.argv[1:])
    run_command(main, "launch", schema_of(kind), mistakes, [f"cluster={kind}"])
