"""Unpack this program on a machine of a cluster, then run a command that uses it.

    python unpack.py ARCHIVE -- COMMAND [ARGUMENT...]

This script needs only the standard library, and fsspec for an archive under gs:// or
s3://. It unpacks the code into a folder of the user's cache, named by the archive's
SHA-256, and puts that folder first in the command's PYTHONPATH. Each start atomically
replaces files that differ from the archive, so processes may start at the same time.
The command then replaces this process (exec), so the command gets all signals and sets
the exit code.
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

_PREEMPTED = 42  # train/errors.py cannot be imported before unpacking.


def main(arguments: Sequence[str]) -> None:
    """Unpack the archive, and replace this process by the command."""
    if len(arguments) < 3 or arguments[1] != "--":
        sys.exit("usage: python unpack.py ARCHIVE -- COMMAND [ARGUMENT...]")
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):  # nothing to save yet
        signal.signal(getattr(signal, name), lambda *_: os._exit(_PREEMPTED))
    archive = arguments[0]
    command = arguments[2:]
    try:
        folder = unpack(read_archive(archive), user_cache_folder())
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        sys.exit(f"{archive}: cannot be unpacked: {error}")
    print(f"code: {folder}", file=sys.stderr, flush=True)
    paths = [str(folder), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        os.execvp(command[0], [*command])
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def read_archive(archive: str) -> bytes:
    """Return the bytes of a local file or of an object in a store."""
    if "://" not in archive:
        return Path(archive).read_bytes()
    import fsspec

    with fsspec.open(archive, "rb") as file:
        return file.read()  # pyright: ignore[reportAttributeAccessIssue]


def user_cache_folder() -> Path:
    """Return a folder in this user's cache, or a temporary one if that is not writable.

    Other users must not be able to write to the folder, because its code is executed.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(root, "longhaul", "code").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="longhaul-code-"))


def unpack(content: bytes, parent: Path) -> Path:
    """Unpack an archive into a folder of `parent`; return the folder.

    Raises:
        ValueError: a member of the archive is not a file inside that folder.
    """
    folder = parent / hashlib.sha256(content).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not member.isfile() or name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{member.name}: is not a file inside the archive")
            file = tar.extractfile(member)
            assert file is not None
            path = folder / name
            data = file.read()
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as tmp:
                    tmp.write(data)
                Path(tmp.name).replace(path)
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
