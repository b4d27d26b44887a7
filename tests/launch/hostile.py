"""Values that a careless launcher would execute, split, expand or lose."""

import json
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


def program(file: Path, text: str) -> Path:
    """Write an executable file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def argument_printer(folder: Path, name: str = "python") -> Path:
    """Write a program that appends its arguments to `arguments.jsonl` next to it.

    It replaces the interpreter, or a command of a cluster, on the PATH.
    """
    write = f"open({str(folder / 'arguments.jsonl')!r}, 'a').write"
    text = f"#!{sys.executable}\nimport json, sys\n{write}(json.dumps(sys.argv[1:])"
    return program(folder / name, text + " + '\\n')\n")


def printed(folder: Path) -> list[list[str]]:
    """Return the arguments of each call."""
    lines = (folder / "arguments.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
