"""`python -m train.branch from=<run>@<step>`: continue a checkpoint in another run.

The config of the other run, the trunk, is the base of the branch's config, and the
arguments override it. The trunk is only read, and may go on at the same time.
"""

import shlex
import sys
from dataclasses import fields, make_dataclass, replace

from etils import epath

from train.cli.command import run_command
from train.cli.flags import is_sweep, parse_flags
from train.cli.leaving import run_and_leave
from train.cli.schema import config_yaml, read_yaml
from train.config import Config, DistributedConfig, RunConfig
from train.errors import ConfigError, Mistake
from train.identity import run_name, training_config

_KEY = "from="


def trunk_of(arguments: list[str]) -> epath.Path:
    """Return the folder of the checkpoint that the argument `from=` names.

    Raises:
        ConfigError: there is no such argument or run, or the argument has another form.
    """
    from train.run.starts import existing_run

    texts = [text.removeprefix(_KEY) for text in arguments if text.startswith(_KEY)]
    directory, _, step = ", ".join(texts).rpartition("@")
    if len(texts) != 1 or not directory or not step.isdecimal():
        rule = "must be given once, as from=<directory of a run>@<step>"
        raise ConfigError([Mistake("from", ", ".join(texts) or None, rule)])
    return existing_run(directory, "from") / "checkpoints" / str(int(step))


def read_schema(arguments: list[str]) -> tuple[type[Config], list[str]]:
    """Return Config with the trunk's values as defaults, and the other arguments.

    The default name is made of the trunk's and the step. The settings that belong to
    the trunk's starts are not taken over. --help needs no trunk.

    Raises:
        ConfigError: there is no trunk, or its config cannot be read.
    """
    others = [text for text in arguments if not text.startswith(_KEY)]
    if {"-h", "--help"}.intersection(arguments):
        return Config, others
    from train.run.starts import read_run

    if is_sweep(parse_flags(others)):
        rule = "is not available: a branch has one base; start the branches one by one"
        raise ConfigError([Mistake("--multirun", True, rule)])
    step = trunk_of(arguments)
    trunk = step.parents[1]
    run = RunConfig(name=f"{trunk.name}-{step.name}")
    base = read_run(str(trunk), int(step.name))
    data = base.data
    if not data.document_mask:  # The key has no effect and may not be given.
        data = replace(data, document_start=None)
    base = replace(base, run=run, data=data, distributed=DistributedConfig())
    # Text such as ${oc.env:NAME} must stay as it is.
    base = read_yaml(trunk, text=config_yaml(base).replace("${", r"\${"))
    defaults = [(key.name, key.type, getattr(base, key.name)) for key in fields(Config)]
    schema = make_dataclass("BranchConfig", defaults, bases=(Config,), frozen=True)
    return schema, others


def main(config: Config) -> int:
    """Start or continue the branch, and return the exit code."""
    from train.start import start_run

    step = trunk_of(sys.argv[1:])
    run_dir = config.run.dir or str(step.parents[2] / run_name(config))
    config = replace(training_config(config), run=replace(config.run, dir=run_dir))
    command = shlex.join(["python", "-m", "train.branch", *sys.argv[1:]])
    return start_run(config, command, step)


if __name__ == "__main__":
    run_and_leave(lambda: run_command(main, "branch", read_schema=read_schema))
