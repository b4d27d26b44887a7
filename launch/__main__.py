"""`python -m launch cluster=...`: the command line of training, on a cluster.

What is not its own of the command line travels word for word. Exit codes: those of the
run if this command keeps it going (local, ssh, tpu_vm), otherwise 0 once it is
submitted; 4, 65 and 78 if the plan says that it is of no use.
"""

import logging
import sys
from pathlib import Path
from typing import Any, assert_never

from launch.config import Action, kind_in, kind_of, schema_of
from launch.job import environment_mistakes, secret_mistakes
from launch.submissions import Submission, submitted
from launch.submit import BACKENDS, render_job, resume, run_directory, submit_job
from launch.subprocesses import run_module
from train.cli.command import run_command
from train.cli.flags import parse_flags
from train.cli.quoting import hydra_text
from train.cli.rules import config_mistakes
from train.errors import FINISHED, ConfigError, Mistake
from train.identity import run_dir, training_config

log = logging.getLogger(__name__)


def main(config: Any) -> int:
    """Carry out `action`."""
    if config.action in (Action.submit, Action.render):
        flags = parse_flags(sys.argv[1:])
        if flags.config_dir or flags.config_name:
            rule = "stays here: presets that travel lie in configs/, or are keys"
            raise ConfigError([Mistake("--config-dir, --config-name", "", rule)])
        act = render_job if config.action is Action.render else submit_job
        return act(config, flags.overrides, str(Path.cwd()))
    submission = submitted(run_directory(config))
    match config.action:
        case Action.resume:
            typed = parse_flags(sys.argv[1:]).overrides
            return resume(submission, typed, launch_mistakes, config.force)
        case Action.logs:
            return BACKENDS[submission.kind].logs(submission, config.follow)
        case Action.stop:
            name, kind = submission.name, submission.kind
            log.info("%s on %s is asked to save and stop: waits for it", name, kind)
            code = BACKENDS[kind].stop(submission)
            log.info("%s has ended", name)
            return code
        case Action.status:
            return _status(submission)
        case _:
            assert_never(config.action)


def launch_mistakes(config: Any) -> list[Mistake]:
    """List what is wrong, with the keys of training too."""
    mistakes_found = config_mistakes(config)
    if config.follow and config.action is not Action.logs:
        mistakes_found.append(Mistake("follow", True, "goes with action=logs only"))
    if config.output and config.action is not Action.render:
        rule = "goes with action=render only"
        mistakes_found.append(Mistake("output", config.output, rule))
    if config.action in (Action.submit, Action.render):
        backend = BACKENDS[kind_of(config.cluster)]
        variables = config.cluster.environment
        mistakes_found += environment_mistakes(variables, backend.SECRETS_REMEDY)
        typed = parse_flags(sys.argv[1:]).overrides
        typed = [word for word in typed if not word.startswith("cluster.environment")]
        mistakes_found += secret_mistakes(typed, backend.SECRETS_REMEDY)
        directory = run_dir(training_config(config))
        try:
            directory = run_directory(config)
        except ConfigError as error:
            mistakes_found += error.mistakes
        mistakes_found += backend.mistakes(config.cluster, directory)
    return mistakes_found


def _status(submission: Submission) -> int:
    """Print what the cluster knows of the job, and what the run knows of itself."""
    print(f"{submission.name}   submitted {submission.time} to {submission.kind}")
    for line in BACKENDS[submission.kind].status(submission):
        print(line)
    sys.stdout.flush()
    if (submission.folder.parent.parent / "config.yaml").exists():
        of_run = hydra_text("run.dir", submission.run_dir)
        return run_module("train.status", [of_run]).returncode
    print("the run has not begun yet")
    return FINISHED


if __name__ == "__main__":
    kind = kind_in(sys.argv[1:])
    run_command(main, "launch", schema_of(kind), launch_mistakes, [f"cluster={kind}"])
