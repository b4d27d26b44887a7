"""Files that what is rendered must equal. To write them anew: GOLDEN=1 pytest ...

Text that is the same in all of a kind, and has tests of its own, is left out of them.
"""

import os
from pathlib import Path

from launch.job import Rendered, shell
from launch.remote.run_script import run_script
from launch.subprocesses import ROOT

_HERE = Path(__file__).parent


_SLURM = (ROOT / "launch/slurm/attempt.sh").read_text()
_BEFORE, _AFTER = run_script(["@"], {}).split("exec @")


def _own(text: str) -> str:
    """Return a script without what all of its kind have."""
    return text.removesuffix(_SLURM).removeprefix(_BEFORE).removesuffix(_AFTER)


def equals_golden(name: str, rendered: Rendered) -> None:
    """Compare all files, and the command, with those of a folder."""
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
        assert (folder / file).read_text() == text, f"{name}/{file}: GOLDEN=1 renews it"
