"""The packages of this program, their folder, and the commands that start it.

In a clone, the packages are top-level modules such as `train`. In an installed wheel
they lie below `longhaul`. `PREFIX` is what their names begin with there.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("configs", "data", "launch", "longhaul", "model", "train")
PREFIX = __name__.removesuffix("data.program")
FOLDER = Path(__file__).resolve().parents[1]  # The folder of the packages.
ROOT = FOLDER.parent if PREFIX else FOLDER  # The folder that PYTHONPATH must name.

_INSTALLATION = re.compile(r"""pip install -e ['"]\.\[([\w,]+)\]['"]""")
_COMMAND = re.compile(r"python -m ((?:train|data|launch)(?:\.[a-z]\w*)*)\b")


class _Starter:
    """How this process was started. Like `sys.argv`, this belongs to the process.

    words: what was typed before the name of the command; None for `python -m`.
    command: the name of the command, if it was typed after these words.
    file: the user's own file that started this process, if one did.
    """

    words: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    file: Path | None = None


def started_by(words: tuple[str, ...], command: str, file: Path | None) -> None:
    """Record how this process was started.

    Args:
        words: what was typed before the name of the command, such as `longhaul`.
        command: the name of the command, which `sys.argv` no longer has.
        file: the user's own file that started this process, if one did.
    """
    _Starter.words = words
    _Starter.command = (command,)
    _Starter.file = file


def words_to_repeat() -> list[str]:
    """Return the words that started this process, without the command's arguments."""
    spec = sys.modules["__main__"].__spec__
    words = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    return [sys.executable, *words, *_Starter.command]


def own_file() -> Path | None:
    """Return the user's own file that started this process, if one did."""
    return _Starter.file


def command_words(
    module: str, python: str = sys.executable, unpacked: bool = False
) -> list[str]:
    """Return the words that start a module of this program, such as `launch.node`.

    They name the user's own file, if it started this process. With `unpacked`, this
    file lies in ROOT. -P keeps the working directory off the path of imports, so
    PYTHONPATH must name ROOT unless this program is installed.
    """
    file = _Starter.file
    if file is None:
        return [python, "-P", "-m", PREFIX + module]
    start = ["-P", "-m", file.stem] if unpacked else [str(file)]
    return [python, *start, short_name(module)]


def installed_words(module: str, python: str) -> list[str]:
    """Return the words that start a module wherever `longhaul` can be imported."""
    return [python, "-P", "-m", "longhaul", short_name(module)]


def short_name(module: str) -> str:
    """Return the name of a command after `longhaul`: `plan` for train.plan."""
    return module.removeprefix("train.")


def shown_command(module: str, arguments: Sequence[str] = ()) -> str:
    """Return a command as the user of this process types it, quoted for a shell."""
    words = ("python", "-m", PREFIX + module)
    if _Starter.words is not None:
        words = (*_Starter.words, short_name(module))
    return shlex.join([*words, *arguments])


def with_shown_commands(text: str) -> str:
    """Return a text in which commands are written as the user types them.

    `text` has them as in a clone: `python -m train.plan`, `pip install -e ".[s3]"`.
    """
    if PREFIX:
        text = _INSTALLATION.sub(r'pip install "longhaul[\1]"', text)
    return _COMMAND.sub(lambda found: shown_command(found[1]), text)
