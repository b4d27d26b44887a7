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
from train.cli.command import Command, Extend, compose, run_command
from train.cli.flags import is_sweep, key_of, parse_flags
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
    arguments: list[str], extend: Extend = lambda schema: schema
) -> tuple[type[Config], list[str]]:
    """Return Config with the branch's base as defaults, and the other arguments.

    The base is recorded in the branch's directory. If the branch has not begun, the
    base is the trunk's config. The default name consists of the trunk's and the step.
    --help and --cfg schema need no trunk.

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
    from train.run.starts import explain_missing_parts, newest_start

    checkpoint = trunk_of(arguments)
    text = base_config(_directory_in(others, checkpoint), checkpoint)
    # Text such as ${oc.env:NAME} must stay as it is.
    text = text.replace("${", r"\${")
    trunk = checkpoint.parents[1]
    with explain_missing_parts(newest_start(trunk), str(trunk)):
        base = read_yaml(trunk, extend(Config), text=text)
    return _schema(base, checkpoint), others


def _schema(base: Config, checkpoint: epath.Path) -> type[Config]:
    """Return Config with the values of `base`, and the branch's name, as defaults."""
    base = replace(base, run=RunConfig(name=_default_name(checkpoint)))
    keys = fields(type(base))
    defaults = [(key.name, key.type, getattr(base, key.name)) for key in keys]
    return make_dataclass("BranchConfig", defaults, bases=(type(base),), frozen=True)


def _directory_in(
    arguments: Sequence[str], checkpoint: epath.Path
) -> epath.Path | None:
    """Return the branch's directory, from the arguments for run.*; None if wrong.

    The directory must be known before the base, which is recorded there.
    """
    from train.run.folder import run_folder

    run_keys = [t for t in arguments if key_of(t).partition(".")[0] == "run"]
    try:
        config = compose(run_keys, "branch", _schema(Config(), checkpoint))
        return run_folder(_directory(config.run, checkpoint))
    except ConfigError:  # reported with the other mistakes of the command line
        return None


def _directory(run: RunConfig, checkpoint: epath.Path) -> str:
    """Return the branch's directory: by default, next to the trunk."""
    name = run.name or _default_name(checkpoint)
    return run.dir or str(checkpoint.parents[2] / name)


def _default_name(checkpoint: epath.Path) -> str:
    return f"{checkpoint.parents[1].name}-{checkpoint.name}"


def main(config: Config) -> int:
    """Start or continue the branch, and return the exit code."""
    from train.run.branch import begin_branch
    from train.run.folder import run_folder
    from train.start import start_run

    checkpoint = trunk_of(sys.argv[1:])
    run_dir = _directory(config.run, checkpoint)
    if _directory_in(sys.argv[1:], checkpoint) != run_folder(run_dir):
        rule = "must not depend on other keys in a branch; write the name out"
        raise ConfigError([Mistake("run.name", config.run.name, rule)])
    config = replace(config.plain(), run=replace(config.run, dir=run_dir))
    command = shown_command("train.branch", sys.argv[1:])
    return start_run(config, command, partial(begin_branch, checkpoint))


COMMAND = Command(main, "branch", read_schema=read_schema, trains=True)

if __name__ == "__main__":
    run_command(COMMAND)
