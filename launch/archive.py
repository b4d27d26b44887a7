"""Pack this program into an archive, for machines that do not share its folder.

The archive holds the files of the installed package, the presets of `configs/`, and the
files that an installation needs. Files that git ignores, hidden files and links that
lead out of the root folder are left out. The same files always give the same bytes.
"""

import gzip
import io
import subprocess
import tarfile
from pathlib import Path

from data.program import FOLDER, PACKAGES, PREFIX

_PACKED_SUFFIXES = (".html", ".py", ".sh", ".yaml")
# Other JSON files may hold keys, so these are packed by name.
_PACKED_FILES = ("class_defaults.json", "py.typed")
_PACKAGES = ("longhaul",) if PREFIX else PACKAGES
SETUP_FILES = ("LICENSE", "README.md", "constraints.txt", "pyproject.toml")


def make_archive(root: Path, own_file: Path | None = None) -> bytes:
    """Return a gzipped tar file of the program whose packages are in `root`.

    The user's own file, if it started the program, comes next to the packages.
    """
    buffer = io.BytesIO()
    # A name or a time in the gzip header would change the bytes of the same files.
    with (
        gzip.GzipFile("", "wb", 9, buffer, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        sources = {name: _source(root, name) for name in files_to_pack(root)}
        if own_file is not None:
            sources[own_file.name] = own_file
        for name, source in sources.items():
            content = source.read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def files_to_pack(root: Path) -> list[str]:
    """List the files to pack, as sorted paths relative to `root`."""
    # A repository around an installed copy belongs to another project.
    names = [] if PREFIX else _unignored_files(root)
    if not names:  # all files on the disk
        paths = [path for package in _PACKAGES for path in (root / package).rglob("*")]
        paths += [root / name for name in SETUP_FILES]
        names = [path.relative_to(root).as_posix() for path in paths]
    return sorted({name for name in names if _is_packed(root, Path(name))})


def _is_packed(root: Path, name: Path) -> bool:
    if any(part.startswith(".") for part in name.parts):
        return False
    path = _source(root, str(name)).resolve()
    if not path.is_file() or not path.is_relative_to(root.resolve()):
        return False
    has_packed_type = name.suffix in _PACKED_SUFFIXES or name.name in _PACKED_FILES
    return str(name) in SETUP_FILES or (name.parts[0] in _PACKAGES and has_packed_type)


def _source(root: Path, name: str) -> Path:
    """Return the file to pack under a name; a wheel has copies of the setup files."""
    is_copied = PREFIX and name in SETUP_FILES
    return (FOLDER / "setup" if is_copied else root) / name


def _unignored_files(root: Path) -> list[str]:
    """List the files that git does not ignore; [] if git or a checkout is missing."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    command += ["--exclude-standard", "--", *_PACKAGES, *SETUP_FILES]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return listing.stdout.split("\0")[:-1]
