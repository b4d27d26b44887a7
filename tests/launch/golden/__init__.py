"""Rendered files must equal these golden files. `GOLDEN=1 pytest ...` rewrites them.

They leave out text that is the same in all scripts of a kind and has its own tests.
"""

import os
import re
from pathlib import Path

from data.program import FOLDER, PREFIX
from launch.job import Rendered, shell
from launch.remote.run_script import run_script

_HERE = Path(__file__).parent


_SLURM = (FOLDER / "launch/slurm/attempt.sh").read_text()
_BEFORE, _AFTER = run_script(["@"], {}).split("exec @")


def _own(text: str) -> str:
    """Return a script without the text that all scripts of its kind share."""
    return text.removesuffix(_SLURM).removeprefix(_BEFORE).removesuffix(_AFTER)


def _with_prefix(text: str) -> str:
    """Return a golden file with the names of modules that a wheel has."""
    return re.sub(r"(-P\W+-m\W+)(?=train\b|launch\b)", rf"\1{PREFIX}", text)


def equals_golden(name: str, rendered: Rendered) -> None:
    """Check that all files and the command equal those of a golden folder."""
    folder = _HERE / name
    files = {name: _own(text) for name, text in rendered.files.items()}
    lines = [*rendered.preparation, shell(rendered.command)]
    files["command"] = "\n".join(lines) + "\n"
    if os.environ.get("GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    assert {file.name for file in folder.iterdir()} == {*files}
    for file, text in files.items():
        expected = _with_prefix((folder / file).read_text())
        assert expected == text, f"{name}/{file}: GOLDEN=1 renews it"
