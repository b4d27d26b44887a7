"""The wheel brings one name, and all of it can be imported and started."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from data.program import FOLDER, PACKAGES, PREFIX, ROOT
from launch.archive import SETUP_FILES
from longhaul import wheel as build
from longhaul.wheel import MOVED, with_moved_imports
from tests.fleet import REPOSITORY
from tests.wheel import build_wheel


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from train import start", "from longhaul.train import start"),
        ("import model.gpt as gpt", "import longhaul.model.gpt as gpt"),
        ("import configs as c", "import longhaul.configs as c"),
        (
            "def f():\n    from data.text import (\n        a,\n    )\n",
            "def f():\n    from longhaul.data.text import (\n        a,\n    )\n",
        ),
        (
            "x = 'é'; from launch import a; from train.b import c  # train",
            "x = 'é'; from longhaul.launch import a; "
            "from longhaul.train.b import c  # train",
        ),
        (
            "'\x0c\u2028'\nfrom train import start\r\n",
            "'\x0c\u2028'\nfrom longhaul.train import start\r\n",
        ),
    ],
)
def test_imports_of_moved_packages_change(source, expected):
    assert with_moved_imports(source) == expected


def test_the_build_knows_all_packages_and_what_an_archive_needs():
    """The build imports nothing of the program, so it states these again."""
    assert {*MOVED, "longhaul"} == {*PACKAGES}
    assert build.SETUP_FILES == SETUP_FILES


def test_nothing_else_changes():
    source = """
import json, os
from . import train
from .data import rows
from longhaul import catalog
from longhaul.train import start
from training import data
text = "from train import start"
"""
    assert with_moved_imports(source) == source


@pytest.mark.parametrize(
    "statement", ["import train", "import data.rows", "import os, model.gpt as gpt"]
)
def test_an_import_that_binds_the_name_of_a_package_is_refused(statement):
    with pytest.raises(ValueError, match=r"line 2: write `from \.\.\. import"):
        with_moved_imports(f"\n{statement}\n")


class Wheel(NamedTuple):
    """The files in the wheel, and the folder from which Python imports them."""

    names: list[str]
    root: Path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Return the installed wheel, or that of this clone, unpacked."""
    root = tmp_path_factory.mktemp("wheel")
    if PREFIX:
        (file,) = (REPOSITORY / "dist").glob("*.whl")
    else:
        file = build_wheel(root / "dist")
    with zipfile.ZipFile(file) as archive:
        if not PREFIX:
            archive.extractall(root)
        return Wheel(archive.namelist(), ROOT if PREFIX else root)


def run_alone(code: str, root: Path, folder: Path, *arguments: str) -> str:
    """Run code in an empty folder, where only the wheel is found; return its output."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_file_is_there_below_the_one_name(wheel: Wheel):
    tops = {name.split("/")[0] for name in wheel.names}
    (metadata,) = tops - {"longhaul"}
    assert metadata.endswith(".dist-info")
    for package in PACKAGES:
        for path in (FOLDER / package).rglob("*.*"):
            if "__pycache__" not in path.parts:
                name = path.relative_to(FOLDER).as_posix()
                assert f"longhaul/{name.removeprefix('longhaul/')}" in wheel.names


IMPORT_ALL = """
import importlib, sys

for name in sys.argv[1:]:
    importlib.import_module(name)
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_no_module_imports_one_of_the_clone(wheel: Wheel, tmp_path: Path):
    files = [Path(name) for name in wheel.names if name.endswith(".py")]
    modules = [".".join(file.with_suffix("").parts) for file in files]
    modules = [name.removesuffix(".__init__") for name in modules]
    assert len(modules) > 300
    imported = run_alone(IMPORT_ALL, wheel.root, tmp_path, *modules).split()
    assert "longhaul" in imported
    assert not {*imported} & {*MOVED}


HELP = """
import contextlib, io, sys
from longhaul.__main__ import script
from longhaul.commands import COMMANDS

for name in COMMANDS:
    sys.argv = ["longhaul", name, "--help"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        script()
    assert f"longhaul {name} " in output.getvalue(), output.getvalue()
    assert "python -m" not in output.getvalue(), output.getvalue()
"""


def test_the_help_of_each_command_names_it_as_typed(wheel: Wheel, tmp_path: Path):
    run_alone(HELP, wheel.root, tmp_path)
