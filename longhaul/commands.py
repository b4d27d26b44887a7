"""Run a command by its name: `longhaul plan ...`, or `python mine.py plan ...`."""

import importlib
import runpy
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from data.program import PREFIX, started_by
from longhaul.catalog import CATALOG, Catalog
from train.cli.command import run_command
from train.cli.hints import did_you_mean, similar_names
from train.errors import WRONG_CONFIG, ConfigError

# The module of each command and what it does, by the name after `longhaul`.
COMMANDS = {
    "train": ("train.__main__", "trains, or continues the run of the same name"),
    "plan": ("train.plan.__main__", "shows layout, memory and speed in advance"),
    "prove": ("train.prove.__main__", "proves that the mesh changes no result"),
    "status": ("train.status", "shows the progress of a run, and how it uses its time"),
    "report": ("train.report", "compares runs on one page"),
    "profile": ("train.profile.__main__", "shows how the time of a step is spent"),
    "checkpoints": ("train.checkpoints", "lists and verifies the checkpoints of a run"),
    "branch": ("train.branch", "continues a checkpoint in another run"),
    "sample": ("train.sample.__main__", "generates text"),
    "evaluate": ("train.evaluate.__main__", "scores a checkpoint"),
    "export": ("train.export", "writes a folder for transformers"),
    "coordinates": (
        "train.coordinates.__main__",
        "shows whether rates transfer between sizes",
    ),
    "launch": ("launch.__main__", "takes training to a cluster"),
    "data.prepare": ("data.prepare", "converts text to a token store"),
    "data.inspect": ("data.inspect", "shows documents and batches"),
    "data.verify": ("data.verify", "reads a whole store, and names what is damaged"),
    "data.train_tokenizer": ("data.train_tokenizer", "learns a tokenizer"),
}
# Programs that the launcher starts on other machines.
_INTERNAL = ("launch.node", "launch.unpack")


def main(catalog: Catalog = CATALOG) -> NoReturn:
    """Run the command that `sys.argv` names, with the parts of a catalog, and exit.

    A file that calls this function becomes the command:

        if __name__ == "__main__":
            longhaul.main(longhaul.CATALOG.with_mixer(GATED_CONV))

    `python mine.py train model.mixer=gated_conv` then trains. The exit code is that of
    the command; it is 78 if the catalog or the command line has mistakes.
    """
    file = sys.argv[0]
    run(catalog, ("python", file), Path(file).resolve())


def run(
    catalog: Catalog, words: tuple[str, ...], own_file: Path | None = None
) -> NoReturn:
    """Run the command that `sys.argv` names after `words`, and exit with its code.

    `own_file` is the user's own file, if it started this process.
    """
    start = f"{shlex.join(words)} <command>"
    lines = [f"  {name:<22}{meaning}" for name, (_, meaning) in COMMANDS.items()]
    lines = [f"Usage: {start} [group=choice] [key=value]", *lines]
    usage = "\n".join([*lines, f"{start} --help lists its keys."])
    name = sys.argv[1] if sys.argv[1:] else "--help"
    if name in ("-h", "--help"):
        print(usage)
        sys.exit(0)
    if name not in (*COMMANDS, *_INTERNAL):
        similar = did_you_mean(similar_names(name, COMMANDS))
        print(f"{name}: there is no such command{similar}\n{usage}", file=sys.stderr)
        sys.exit(WRONG_CONFIG)
    if mistakes := catalog.mistakes():
        print(ConfigError(mistakes), file=sys.stderr)
        sys.exit(WRONG_CONFIG)
    started_by(words, name, own_file)
    del sys.argv[1]
    if name in _INTERNAL:
        runpy.run_module(PREFIX + name, run_name="__main__", alter_sys=True)
        sys.exit(0)
    module, _ = COMMANDS[name]
    command = importlib.import_module(PREFIX + module).COMMAND
    run_command(command, catalog.schema)
