"""`python -m launch cluster=...`: run `python -m train` on a cluster.

Arguments that are not launcher keys are passed to training unchanged. If this command
supervises the run in the foreground (local, ssh, tpu_vm), it exits with the run's code.
Otherwise it exits with 0 after the submission. If the plan says that the run cannot
succeed, it exits with 4, 65 or 78 (train/errors.py).
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any, assert_never

from data.errors import Mistake
from data.program import own_file
from launch.config import Action, kind_in, kind_of, schema_of
from launch.config.clusters import Code
from launch.input_paths import input_path_mistakes
from launch.job import environment_mistakes, secret_mistakes
from launch.submissions import Submission, require_submission
from launch.submit import BACKENDS, render_job, resolved_run_dir, resume, submit_job
from launch.subprocesses import run_module
from train.cli.command import Command, Extend, run_command
from train.cli.flags import parse_flags
from train.cli.quoting import hydra_text
from train.cli.rules import config_mistakes
from train.errors import FINISHED, ConfigError
from train.identity import run_dir

log = logging.getLogger(__name__)


def main(config: Any) -> int:
    """Carry out `config.action`, and return the exit code."""
    if config.action in (Action.submit, Action.render):
        flags = parse_flags(sys.argv[1:])
        if flags.config_dir or flags.config_name:
            rule = "has no effect on a cluster: use a preset in configs/, or overrides"
            raise ConfigError([Mistake("--config-dir, --config-name", "", rule)])
        run_action = render_job if config.action is Action.render else submit_job
        return run_action(config, flags.overrides, str(Path.cwd()))
    submission = require_submission(resolved_run_dir(config))
    match config.action:
        case Action.resume:
            overrides = parse_flags(sys.argv[1:]).overrides
            return resume(submission, overrides, launch_mistakes, config)
        case Action.logs:
            return BACKENDS[submission.kind].logs(submission, config.follow)
        case Action.stop:
            name = submission.name
            kind = submission.kind
            log.info("asked %s on %s to save and stop; waiting for it", name, kind)
            code = BACKENDS[kind].stop(submission)
            log.info("%s has ended", name)
            if config.json:
                print(submission.as_json(exit_code=code))
            return code
        case Action.status:
            if config.json:
                return _print_status_json(submission)
            return _print_status(submission)
        case _:
            assert_never(config.action)


def launch_mistakes(config: Any) -> list[Mistake]:
    """List the mistakes in the training keys, launcher keys and cluster keys."""
    mistakes = config_mistakes(config)
    if config.follow and config.action is not Action.logs:
        mistakes.append(Mistake("follow", True, "goes with action=logs only"))
    if config.json and config.action is Action.logs:
        rule = "does not go with action=logs, which prints the output of the run; "
        mistakes.append(Mistake("json", True, f"{rule}leave it out"))
    if config.output and config.action is not Action.render:
        rule = "goes with action=render only"
        mistakes.append(Mistake("output", config.output, rule))
    if config.action in (Action.submit, Action.render):
        backend = BACKENDS[kind_of(config.cluster)]
        variables = config.cluster.environment
        mistakes += environment_mistakes(variables, backend.SECRETS_REMEDY)
        overrides = parse_flags(sys.argv[1:]).overrides
        checked = ("cluster.environment", "cluster.secrets")  # by the backend
        overrides = [o for o in overrides if not o.lstrip("+").startswith(checked)]
        mistakes += secret_mistakes(overrides, backend.SECRETS_REMEDY)
        directory = run_dir(config.plain())
        try:
            directory = resolved_run_dir(config)
        except ConfigError as error:
            mistakes += error.mistakes
        mistakes += backend.cluster_mistakes(config.cluster, directory)
        mistakes += input_path_mistakes(config)
        file = own_file()
        if file is not None and getattr(config.cluster, "code", None) is Code.image:
            rule = f"does not bring {file.name} to the machines; use archive or shared"
            mistakes.append(Mistake("cluster.code", Code.image, rule))
    return mistakes


def _print_status(submission: Submission) -> int:
    """Print the job's state on the cluster, then the output of `train.status`."""
    print(f"{submission.name}   submitted {submission.time} to {submission.kind}")
    for line in BACKENDS[submission.kind].status(submission):
        print(line)
    sys.stdout.flush()
    if _has_begun(submission):
        run_override = hydra_text("run.dir", submission.run_dir)
        return run_module("train.status", [run_override]).returncode
    print("the run has not begun yet")
    return FINISHED  # 0, because the status was printed


def _print_status_json(submission: Submission) -> int:
    """Print the same as one JSON object; `run` is null if the run has not begun."""
    backend = BACKENDS[submission.kind]
    alive = backend.alive(submission)
    code = FINISHED
    run = None
    if _has_begun(submission):
        arguments = [hydra_text("run.dir", submission.run_dir), "json=true"]
        status = run_module("train.status", arguments, stdout=subprocess.PIPE)
        code = status.returncode
        run = json.loads(status.stdout) if code == FINISHED else None
    print(submission.as_json(alive=alive, state=backend.status(submission), run=run))
    return code


def _has_begun(submission: Submission) -> bool:
    return (submission.folder.parent.parent / "config.yaml").exists()


def read_schema(arguments: list[str], extend: Extend) -> tuple[type, list[str]]:
    """Return the dataclass of all keys for the kind of cluster that is named."""
    return extend(schema_of(kind_in(arguments))), arguments


COMMAND = Command(
    main,
    "launch",
    validate=launch_mistakes,
    default_choices=lambda arguments: [f"cluster={kind_in(arguments)}"],
    read_schema=read_schema,
)

if __name__ == "__main__":
    run_command(COMMAND)
