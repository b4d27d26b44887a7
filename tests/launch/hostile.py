"""Values that a careless launcher would run, split, expand or lose."""

import json
import stat
import sys
from pathlib import Path

# Each must arrive verbatim as one argument of `python -m train`, or be refused.
VALUES = (
    *("a b", "  two  spaces  ", "'", '"', "it's", 'say "so"', "'; echo gone; '"),
    *("$(echo gone)", "`echo gone`", "$HOME", "${HOME}", "$$", "$((1+1))", "$!"),
    *("a;b", "a&&b", "a|b", "a>b", "a<b", "a&", "#not a comment", "!event", "~"),
    *("*", "?[a-z]", "{a,b}", "\\", "\\n", "a\\ b", "%j", "%%", "$(POD_NAME)"),
    *("{{ .Values.x }}", "é ü 漢字 🚀", "--flag", "-x", "a=b", "key: value", "- item"),
    *("@", "null", "#SBATCH --exclusive", "EOF", "\ta", "two\nlines", "bell\a", "\r"),
)


def argument_printer(folder: Path, name: str = "python") -> Path:
    """Write a program that appends its arguments to `arguments.jsonl` beside it.

    It stands for the interpreter, or for a cluster's own command, on the PATH.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"open({str(folder / 'arguments.jsonl')!r}, 'a')"
        ".write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def printed(folder: Path) -> list[list[str]]:
    """Give the arguments of each call."""
    lines = (folder / "arguments.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
