"""Unpacks this program where it has come to, and becomes the command that uses it.

    python unpack.py ARCHIVE -- COMMAND [ARGUMENT...]

It needs the standard library alone, and fsspec for an archive under gs:// or s3://. The
code comes to a folder of the user's cache that is named by the archive's SHA-256, and
is the first in the command's PYTHONPATH. Each start compares every file there with the
archive, and puts it whole in its place if it differs, so several may start at once. The
command takes the place of this process: signals and exit codes are its own.
"""

import hashlib
import io
import os
import signal
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

_PREEMPTED = 42  # train/errors.py is still in the archive


def main(arguments: Sequence[str]) -> None:
    """Unpack, and become the command."""
    if len(arguments) < 3 or arguments[1] != "--":
        sys.exit("usage: python unpack.py ARCHIVE -- COMMAND [ARGUMENT...]")
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):  # nothing to save so far
        signal.signal(getattr(signal, name), lambda *_: os._exit(_PREEMPTED))
    archive, command = arguments[0], arguments[2:]
    try:
        folder = unpack(read_archive(archive), cache())
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        sys.exit(f"{archive}: cannot be unpacked: {error}")
    print(f"code: {folder}", file=sys.stderr, flush=True)
    paths = [str(folder), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        os.execvp(command[0], [*command])
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def read_archive(archive: str) -> bytes:
    """Read a file of this machine, or an object."""
    if "://" not in archive:
        return Path(archive).read_bytes()
    import fsspec

    with fsspec.open(archive, "rb") as file:
        return file.read()  # pyright: ignore[reportAttributeAccessIssue]


def cache() -> Path:
    """Return a folder that this user alone can write: code from it is run.

    The user's cache, or, without a home, a new one.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(root, "longhaul", "code").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="longhaul-code-"))


def unpack(content: bytes, into: Path) -> Path:
    """Put all files of an archive in their places, and give the folder.

    Raises:
        ValueError: the archive holds something else than files inside that folder.
    """
    folder = into / hashlib.sha256(content).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not member.isfile() or name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{member.name}: is no file inside the archive")
            file = tar.extractfile(member)
            assert file is not None
            path, data = folder / name, file.read()
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
                    new.write(data)
                Path(new.name).replace(path)
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
