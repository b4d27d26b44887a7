"""Pack this program into an archive, for machines that do not share its folder.

The archive holds the files of the installed package, the presets of `configs/`, and the
files that an installation needs. Files that git ignores, hidden files and links that
lead out of the root folder are left out. The same files always give the same bytes.
"""

import gzip
import io
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

_PACKED_SUFFIXES = (".html", ".py", ".sh", ".yaml")
_PACKAGES = ("configs", "data", "launch", "model", "train")
_SETUP_FILES = ("LICENSE", "README.md", "constraints.txt", "pyproject.toml")


def make_archive(root: Path) -> bytes:
    """Return a gzipped tar file of the program whose packages are in `root`."""
    buffer = io.BytesIO()
    # A name or a time in the gzip header would change the bytes of the same files.
    with (
        gzip.GzipFile("", "wb", 9, buffer, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in files_to_pack(root):
            content = (root / name).read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def files_to_pack(root: Path) -> list[str]:
    """List the files to pack, as sorted paths relative to `root`."""
    names = _unignored_files(root) or _files_on_disk(root)
    return sorted({name for name in names if _is_packed(root, Path(name))})


def _is_packed(root: Path, name: Path) -> bool:
    if any(part.startswith(".") for part in name.parts):
        return False
    path = (root / name).resolve()
    if not path.is_file() or not path.is_relative_to(root.resolve()):
        return False
    has_packed_type = name.suffix in _PACKED_SUFFIXES or name.name == "py.typed"
    return str(name) in _SETUP_FILES or (name.parts[0] in _PACKAGES and has_packed_type)


def _unignored_files(root: Path) -> list[str]:
    """List the files that git does not ignore; [] if git or a checkout is missing."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    command += ["--exclude-standard", "--", *_PACKAGES, *_SETUP_FILES]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return listing.stdout.split("\0")[:-1]


def _files_on_disk(root: Path) -> Iterable[str]:
    paths = [path for package in _PACKAGES for path in (root / package).rglob("*")]
    paths += [root / name for name in _SETUP_FILES]
    return [path.relative_to(root).as_posix() for path in paths]
