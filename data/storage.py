"""Access files on a local disk, under gs:// and under s3://.

Paths are `epath.Path`, which opens, reads, lists and globs all of them in the same way.
This module adds what epath lacks: atomic writes, appending, moves, listings of whole
trees in few requests, and errors that say whether trying again helps. Writes that
require an unchanged file are in data/key_value_store.py.

An object store has no folders, no rename and no append. A written object appears
complete or not at all. Credentials and the region are looked up as Amazon's and
Google's own tools do it; AWS_ENDPOINT_URL names another server with the S3 protocol.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import fsspec.config
from etils import epath

from data.errors import DataError
from data.names import checked_name

Result = TypeVar("Result")

EXTRAS = {"s3": "s3", "gs": "gcs"}  # the pip extra for the client of each scheme
ANSWER_S = 5.0  # the timeout of a single request to a store
FIRST_ANSWER_S = 60.0  # how long a command waits for a remote location to answer


class NotAFileError(OSError):
    """A path is that of a pipe, a socket, a device or a folder, not of a file."""


# Packages whose errors the clients of stores pass on.
_CLIENTS = (
    "aiobotocore.",
    "aiohttp.",
    "botocore.",
    "fsspec.",
    "gcsfs.",
    "google.api_core.",
    "google.auth.",
    "google.cloud.",
    "huggingface_hub.",
    "httpx.",
    "requests.",
    "s3fs.",
    "urllib3.",
)
# After these errors, another attempt would fail as well.
_PERMANENT = (
    NotAFileError,
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
)
# TensorStore's messages about the same errors begin with these words.
_STATUS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "NOT_FOUND", "FAILED_PRECONDITION")


class StorageError(DataError):
    """A file or folder cannot be read or written.

    Attributes:
        reason: the message of the operating system, the store or its client.
        is_permanent: whether another attempt would fail as well, because the location
            is missing or refuses access. Otherwise the store did not answer.
    """

    def __init__(self, location: object, error: Exception, action: str):
        self.reason = _reason(error)
        self.is_permanent = isinstance(error, _PERMANENT)
        self.is_permanent |= str(error).startswith(_STATUS)
        super().__init__(
            f"{location}: cannot be {action} ({self.reason}). Check path, network and "
            f"permissions"
        )


def is_client_error(error: BaseException) -> bool:
    """Return whether an error is one of a store's client, and not of the system."""
    return f"{type(error).__module__}.".startswith(_CLIENTS)


def wait_for_answer(location: str, request: Callable[[], Result]) -> Result:
    """Return the result of the first request to a remote location.

    The clients of stores would wait for minutes. Raises StorageError if there is no
    answer within `FIRST_ANSWER_S`, and otherwise whatever the request raises.
    """
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    # A daemon does not keep the process alive after the time limit.
    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(FIRST_ANSWER_S)
    except TimeoutError as error:
        raise StorageError(location, error, "read") from error


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, such as one under gs:// or s3://."""
    return "://" in os.fspath(path)


def local_path(location: str | Path) -> Path:
    """Return a local path as an absolute path, without `~` and `..`.

    TensorStore and Orbax refuse `..`.
    """
    path = Path(location).expanduser().absolute()
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def storage_path(location: str) -> epath.Path:
    """Return the path of a location. A local path becomes absolute, without `~`.

    Raises ValueError if the scheme is unknown, or the client of its store is not
    installed. The message states the rule, or the command that installs the client.
    """
    scheme, remote, _ = location.partition("://")
    if not remote:
        return epath.Path(local_path(location))
    if scheme not in EXTRAS:
        raise ValueError("must be a local folder, or one under s3:// or gs://")
    # Other processes and TensorStore write to the same folders, so a listing that
    # fsspec caches may be out of date.
    fsspec.config.conf.setdefault(scheme, {}).setdefault("use_listings_cache", False)
    # Make the S3 client retry for about a minute. Its default is about seven seconds.
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "15")
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        message = f"{error}: pip install -e '.[{EXTRAS[scheme]}]'"
        raise ValueError(message) from None
    return epath.Path(location.rstrip("/"))


def is_taken(path: os.PathLike[str]) -> bool:
    """Return whether there is anything at a path, even a link that leads nowhere."""
    if is_remote(path):
        return epath.Path(path).exists()
    return Path(path).exists() or Path(path).is_symlink()


def is_real_folder(path: os.PathLike[str]) -> bool:
    """Return whether a path is a folder and not a link, so that its files are its own.

    In an object store, which has neither, the result is always true.
    """
    return is_remote(path) or (Path(path).is_dir() and not Path(path).is_symlink())


def check_regular(path: os.PathLike[str]) -> None:
    """Check that a local path is a regular file, or a link to one.

    Opening a pipe or a device may block forever.

    Raises:
        NotAFileError: there is something else at the path.
        OSError: there is nothing at the path, or it cannot be searched.
    """
    if not is_remote(path) and not stat.S_ISREG(Path(path).stat().st_mode):
        raise NotAFileError(f"{Path(path).name} is not a regular file")


def file_below(folder: epath.Path, name: Any) -> epath.Path:
    """Return the path of a regular file, given its name, which comes from a file.

    Raises:
        ValueError: the name is not that of a file below the folder.
        OSError: as for `check_regular`.
    """
    path = folder / checked_name(name)
    check_regular(path)
    return path


@contextlib.contextmanager
def created_atomically(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary local path; the file or folder made there becomes `path`.

    `path` appears complete or not at all; for a file, this holds after a power failure
    too. An older file is replaced. If another process has already created a folder at
    `path`, that folder stays and the new one is deleted. The parent folder must exist.
    By default the temporary name is random, so that several processes may create `path`
    at the same time. Raises OSError if `path` cannot be written. The temporary path is
    always removed.
    """
    partial = temporary or path.with_name(
        f"{path.name}.building-{secrets.token_hex(4)}"
    )
    remove_tree(partial)  # a leftover, or a link or a pipe that must not be opened
    try:
        yield partial
        if partial.is_file():
            with partial.open("rb") as file:
                # Without this, a power failure might leave an empty file.
                os.fsync(file.fileno())
            partial.replace(path)
            return
        try:
            partial.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        remove_tree(partial)


def remove_tree(path: Path) -> None:
    """Remove a local file, folder or link, if possible; links are not followed."""
    if is_real_folder(path):  # rmtree would open a pipe, and wait
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def write_atomically(
    path: epath.Path,
    content: str | bytes | Iterable[bytes],
    temporary: epath.Path | None = None,
) -> None:
    """Write a file that appears complete or not at all, even after a power failure.

    The folder of a local file is created if missing. Text is encoded as UTF-8. A local
    file is first written to `temporary`, by default a fixed hidden name in the same
    folder, so only one process may write at a time. Raises OSError if writing fails.
    """
    content = content.encode() if isinstance(content, str) else content
    chunks = [content] if isinstance(content, bytes) else content
    if is_remote(path):  # the upload of one object is atomic
        path.write_bytes(b"".join(chunks))
        return
    hidden_path = Path(temporary or path.parent / f".{path.name}.tmp")
    hidden_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        created_atomically(Path(path), hidden_path) as partial,
        partial.open("wb") as file,
    ):
        file.writelines(chunks)


class AppendedFile:
    """A local file to which each chunk is appended completely or not at all."""

    def __init__(self, path: Path):
        """Open the file, and create it if it is missing; its folder must exist."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        self._synced_bytes = os.fstat(self._fd).st_size

    def append(self, chunk: bytes) -> None:
        """Append a chunk, or raise OSError and leave the file as it was."""
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, chunk) < len(chunk):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def sync(self) -> None:
        """Make all chunks survive a power failure.

        If fsync fails, this method removes all chunks since the last successful `sync`
        and raises OSError, because a second fsync might succeed although they are lost.
        """
        try:
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._synced_bytes)
            raise
        self._synced_bytes = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def list_files(folder: epath.Path) -> list[str]:
    """Return the relative paths of all files below a remote folder, in few requests.

    Raises FileNotFoundError if the folder holds no file.
    """
    client, root = fsspec.url_to_fs(os.fspath(folder))
    names = [name.removeprefix(f"{root}/") for name in client.find(root)]
    if not names:
        raise FileNotFoundError(folder)
    return names


def move_folder(folder: epath.Path, target: epath.Path) -> None:
    """Move a folder.

    In an object store, all objects are copied and then deleted. If the process is
    killed before the first deletion, all objects are still in `folder`.
    """
    if not is_remote(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        return
    client, root = fsspec.url_to_fs(os.fspath(folder))
    names = list_files(folder)
    sources = [f"{root}/{name}" for name in names]
    client.copy(sources, [f"{target}/{name}" for name in names])
    client.rm(sources)


def copy_file(file: epath.Path, target: epath.Path) -> None:
    """Copy a file between paths of any kind; the target's folder is made if missing.

    Raises:
        OSError: the file is not a regular file, or cannot be copied.
    """
    check_regular(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not is_remote(target):
        remove_tree(Path(target))  # a link must not be followed
    with file.open("rb") as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 2**22)


def upload_folder(folder: Path, target: epath.Path) -> None:
    """Copy all files of a local folder to a path."""
    for path in folder.rglob("*"):
        if path.is_file():
            copy_file(epath.Path(path), target / path.relative_to(folder).as_posix())


def modified_at(folder: epath.Path) -> float:
    """Return the Unix time of a folder's last change.

    For a remote folder, this is the time at which its first file was written.
    """
    if not is_remote(folder):
        return folder.stat().mtime
    client, _ = fsspec.url_to_fs(os.fspath(folder))
    return client.modified(os.fspath(folder / list_files(folder)[0])).timestamp()


def _reason(error: Exception) -> str:
    """Return the reason of a failure as one line, if possible the system's message."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if code := re.search(r"\[os_error_code='(\d+)'\]", str(error)):
        return os.strerror(int(code[1]))
    if system_message := getattr(error, "strerror", None):
        return system_message
    # In TensorStore's messages, zero bytes separate keys; some of them are escaped.
    message = str(error).replace("\0", "/").replace("\\x00", "/")
    return message.partition("\n")[0]
