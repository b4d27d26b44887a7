"""Files that what is rendered must equal. To write them anew: GOLDEN=1 pytest ..."""

import os
from pathlib import Path

from launch.job import Rendered, shell

_HERE = Path(__file__).parent / "golden"


def equals_golden(name: str, rendered: Rendered) -> None:
    """Compare all files, and the command, with those of a folder."""
    folder = _HERE / name
    files = {**rendered.files, "command": shell(rendered.command) + "\n"}
    if os.environ.get("GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    assert {file.name for file in folder.iterdir()} == {*files}
    for file, text in files.items():
        assert (folder / file).read_text() == text, f"{name}/{file}: GOLDEN=1 renews it"
