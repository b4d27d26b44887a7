"""`python -m train.branch from=<run>@<step>`: continue a checkpoint in another run.

The config of the other run, the trunk, is the base of the branch's config, and the
arguments override it. The trunk is only read, and may go on at the same time.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields, make_dataclass, replace
from functools import partial

from etils import epath

from data.errors import Mistake
from data.program import shown_command
from train.cli.command import Command, Extend, compose, run_command, unextended
from train.cli.flags import is_sweep, parse_flags
from train.cli.schema import read_yaml
from train.config import Config, RunConfig
from train.errors import ConfigError

_KEY = "from="


def trunk_of(arguments: Sequence[str]) -> epath.Path:
    """Return the folder of the checkpoint that the argument `from=` names.

    Raises:
        ConfigError: there is no such argument, or it has another form.
    """
    from train.run.folder import run_folder

    texts = [text.removeprefix(_KEY) for text in arguments if text.startswith(_KEY)]
    directory, _, step = ", ".join(texts).rpartition("@")
    if len(texts) != 1 or not directory or not (step.isascii() and step.isdigit()):
        rule = "must be given once, as from=<directory of a run>@<step>"
        raise ConfigError([Mistake("from", ", ".join(texts) or None, rule)])
    return run_folder(directory, "from") / "checkpoints" / str(int(step))


def read_schema(
    arguments: list[str], extend: Extend = unextended
) -> tuple[type[Config], list[str]]:
    """Return Config with the branch's base as defaults, and the other arguments.

    The base is recorded in the branch's directory, or is the trunk's config if the
    branch has not begun. The default name is made of the trunk's and the step. --help
    and --cfg schema need no trunk.

    Raises:
        ConfigError: there is no trunk, or its config cannot be read.
    """
    others = [text for text in arguments if not text.startswith(_KEY)]
    flags = parse_flags(others)
    if flags.help or flags.cfg == "schema":
        return extend(Config), others
    if is_sweep(flags):
        rule = "is not available: a branch has one base; start the branches one by one"
        raise ConfigError([Mistake("--multirun", True, rule)])
    from train.run.branch import base_config
    from train.run.starts import needing_parts, newest_start

    step = trunk_of(arguments)
    base = base_config(_directory_in(others, step), step)
    # Text such as ${oc.env:NAME} must stay as it is.
    text = base.replace("${", r"\${")
    run = step.parents[1]
    with needing_parts(newest_start(run), str(run)):
        base = read_yaml(run, extend(Config), text=text)
    return _schema(base, step), others


def _schema(base: Config, step: epath.Path) -> type[Config]:
    """Return Config with other defaults, and the default name of a branch."""
    base = replace(base, run=RunConfig(name=f"{step.parents[1].name}-{step.name}"))
    keys = fields(type(base))
    defaults = [(key.name, key.type, getattr(base, key.name)) for key in keys]
    return make_dataclass("BranchConfig", defaults, bases=(type(base),), frozen=True)


def _directory_in(arguments: Sequence[str], step: epath.Path) -> epath.Path | None:
    """Return the branch's directory, from the arguments for run.*; None if wrong.

    The directory must be known before the base, which is recorded there.
    """
    from train.run.folder import run_folder

    keys = {text: text.lstrip("+~").partition("=")[0] for text in arguments}
    own = [text for text in arguments if keys[text].partition(".")[0] == "run"]
    try:
        config = compose(own, "branch", _schema(Config(), step))
        return run_folder(_directory(config.run, step))
    except ConfigError:  # reported with the other mistakes of the command line
        return None


def _directory(run: RunConfig, step: epath.Path) -> str:
    """Return the branch's directory: by default, next to the trunk."""
    default_name = f"{step.parents[1].name}-{step.name}"
    return run.dir or str(step.parents[2] / (run.name or default_name))


def main(config: Config) -> int:
    """Start or continue the branch, and return the exit code."""
    from train.run.branch import begin_branch
    from train.run.folder import run_folder
    from train.start import start_run

    step = trunk_of(sys.argv[1:])
    run_dir = _directory(config.run, step)
    if _directory_in(sys.argv[1:], step) != run_folder(run_dir):
        rule = "must not depend on other keys in a branch; write the name out"
        raise ConfigError([Mistake("run.name", config.run.name, rule)])
    config = replace(config.plain(), run=replace(config.run, dir=run_dir))
    command = shown_command("train.branch", sys.argv[1:])
    return start_run(config, command, partial(begin_branch, step))


COMMAND = Command(main, "branch", read_schema=read_schema, trains=True)

if __name__ == "__main__":
    run_command(COMMAND)
