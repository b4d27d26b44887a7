"""A run under s3:// or gs://: what an object store does otherwise than a disk.

There is no rename, and there are no folders: an object is there whole or not at all,
and a checkpoint is there once Orbax has put `commit_success.txt` beside its files.
What this cannot hide: a step that is set aside is copied and then removed, object by
object, by the store itself.

Credentials and region come from where Amazon's and Google's own tools look for them;
AWS_ENDPOINT_URL names another server that speaks S3.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import fsspec.config
from etils import epath

from data.errors import DataError
from data.machine import is_remote
from train.errors import CRASHED, ConfigError, Exit, Mistake

_SCHEMES = {"s3": "s3", "gs": "gcs"}  # and the extra that installs what reads it
_COMMITTED = "commit_success.txt"
_ANSWER_S = 5.0  # a store that has not answered by then is out of reach


def run_folder(directory: str, key: str = "run.dir") -> epath.Path:
    """Return a folder, of a run unless `key` says; a local one as an absolute path.

    Raises:
        ConfigError: a store that is not known, or whose library is not installed.
    """
    scheme, remote, _ = directory.partition("://")
    if not remote:
        return epath.Path(Path(directory).expanduser().absolute())
    if scheme not in _SCHEMES:
        rule = "must be a local folder, or one under s3:// or gs://"
        raise ConfigError([Mistake(key, directory, rule)])
    # Other processes write here too, and Orbax past fsspec: a listing is soon wrong.
    fsspec.config.conf.setdefault(scheme, {}).setdefault("use_listings_cache", False)
    # To last through a minute without the server: by default it is some 7 seconds.
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "15")
    try:
        fsspec.filesystem(scheme)
    except ImportError as error:
        rule = f"{error}: pip install -e '.[{_SCHEMES[scheme]}]'"
        raise ConfigError([Mistake(key, directory, rule)]) from None
    return epath.Path(directory.rstrip("/"))


def check_answers(folder: epath.Path) -> None:
    """Ask an object store for one key, before fsspec does, which waits for minutes.

    Raises:
        Exit: CRASHED, if it does not answer, or refuses.
    """
    if not is_remote(folder):
        return
    from data.token_store.storage import Storage  # TensorStore: for few commands

    try:
        Storage(os.fspath(folder)).read_version("lease.json", _ANSWER_S)
    except DataError as error:
        raise Exit(CRASHED, str(error)) from error


def write_whole(
    file: epath.Path,
    content: str | bytes | Iterator[bytes],
    partial: epath.Path | None = None,
) -> None:
    """Write a file so that it is there whole, also after a power cut, or not at all.

    Args:
        file: an object, or a local file; its folder is made if missing.
        content: text is written as UTF-8; pieces one after another.
        partial: what a local one is called until it is whole; default: hidden beside.

    Raises:
        OSError: it was not written.
    """
    content = content.encode() if isinstance(content, str) else content
    pieces = [content] if isinstance(content, bytes) else content
    if is_remote(file):  # the upload of one object is atomic by itself
        file.write_bytes(b"".join(pieces))
        return
    new = Path(partial or file.parent / f".{file.name}.tmp")
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        with new.open("wb") as opened:
            opened.writelines(pieces)
            opened.flush()
            os.fsync(opened.fileno())  # else the new name may hold nothing
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def as_json(value: Any) -> Any:
    """Return a value as JSON has it.

    Scalars of NumPy and JAX become Python's, and what is not finite becomes None.
    """
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    value = value.item() if hasattr(value, "item") else value
    is_number = not isinstance(value, float) or math.isfinite(value)
    return value if is_number else None


def names_in(folder: epath.Path) -> list[str]:
    """List all objects under a folder by their paths in it, in a few requests.

    Raises:
        FileNotFoundError: there is none.
    """
    files, root = fsspec.url_to_fs(os.fspath(folder))
    names = [name.removeprefix(f"{root}/") for name in files.find(root)]
    if not names:
        raise FileNotFoundError(folder)
    return names


def move(folder: epath.Path, target: epath.Path) -> None:
    """Move a folder; killed in between, what was not copied is where it was."""
    if not is_remote(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        return
    files, root = fsspec.url_to_fs(os.fspath(folder))
    names = names_in(folder)
    old, new = ([f"{top}/{name}" for name in names] for top in (root, f"{target}"))
    files.copy(old, new)
    files.rm(old)


def upload(folder: Path, target: epath.Path) -> None:
    """Copy the files of a local folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(folder).as_posix()
            copy.write_bytes(path.read_bytes())


def written_at(step: epath.Path) -> float:
    """Return when a step was written (unix seconds); folders there have no time."""
    if not is_remote(step):
        return step.stat().mtime
    files, _ = fsspec.url_to_fs(os.fspath(step))
    return files.modified(os.fspath(step / names_in(step)[0])).timestamp()


def is_committed(step: epath.Path) -> bool:
    """Return whether a step was written to its end."""
    return (step / _COMMITTED).exists()


def remove_uncommitted(checkpoints: epath.Path) -> None:
    """Remove what dead saves left.

    Orbax, asked to, would take each folder that is no committed step for one of these,
    among them those in which steps are set aside.
    """
    if checkpoints.exists():
        for folder in checkpoints.iterdir():
            if folder.name.isdigit() and not is_committed(folder):
                folder.rmtree(missing_ok=True)
