"""Build the wheel, and copy the tests to where they run against it.

    python -m tests.wheel DEST
    pip install DEST/dist/*.whl     # into an environment with the extra `test`
    cd DEST && python -m pytest tests/data

DEST gets a copy of the repository without the packages of the program, so that only the
installed wheel has them. The Python files there import them below `longhaul`.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from data.program import PACKAGES
from longhaul.wheel import with_moved_imports

_REPOSITORY = Path(__file__).resolve().parents[1]
_BUILD = """
import sys
from setuptools.build_meta import build_wheel
build_wheel(sys.argv[1])
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this repository into a folder, and return its path.

    A copy of the files is built, because setuptools would leave its files among them.
    """
    with tempfile.TemporaryDirectory() as source:
        for name in _files():
            _copy(name, Path(source))
        command = [sys.executable, "-c", _BUILD, str(folder)]
        subprocess.run(command, cwd=source, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_tests(folder: Path) -> None:
    """Copy all files but those of the packages, with imports as in the wheel."""
    for name in _files():
        if name.parts[0] not in PACKAGES:
            path = _copy(name, folder)
            if path.suffix == ".py":
                try:
                    path.write_text(with_moved_imports(path.read_text()))
                except ValueError as error:
                    raise SystemExit(f"{name}: {error}") from None


def _files() -> Iterator[Path]:
    """Yield the paths of the files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.check_output(command, cwd=_REPOSITORY, text=True)
    for name in listing.split("\0")[:-1]:
        if (_REPOSITORY / name).is_file():
            yield Path(name)


def _copy(name: Path, folder: Path) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(_REPOSITORY / name, path))


if __name__ == "__main__":
    destination = Path(sys.argv[1]).resolve()
    copy_tests(destination)
    print(build_wheel(destination / "dist"))
