"""Find the folder of a run, check its layout, and explain why it is inaccessible."""

from pathlib import Path

from etils import epath

from data.errors import DataError, Mistake
from data.storage import (
    StorageError,
    check_regular,
    is_real_folder,
    is_remote,
    is_taken,
    storage_path,
    wait_for_answer,
)
from train.errors import CRASHED, ConfigError, Exit
from train.records import damaged
from train.run.digests import DESCRIPTION, saved_steps

_FILES = (
    *("config.yaml", "lease.json", "metrics.jsonl", "events.jsonl", "results.json"),
    *("init_from.json", "branch.json", "profile_request.json"),
)
_SUBFOLDERS = ("starts", "checkpoints", "evaluations", "profiles", "stacks", "launch")
# Starts delete files of these folders, so a link must not lead to other files.
_REAL_FOLDERS = ("metrics", "events")
_REAL_CHECKPOINT_FOLDERS = ("unsealed", "quarantine")
_REMEDY = "Move it away, or put back what a copy of the run has there."


def run_folder(directory: str, key: str = "run.dir") -> epath.Path:
    """Return the path of the folder that the config key `key` names.

    Raises:
        ConfigError: the store in `key` is unknown, or its client is not installed.
    """
    try:
        return storage_path(directory)
    except ValueError as error:
        raise ConfigError([Mistake(key, directory, str(error))]) from None


def access_error(run_dir: str, error: Exception) -> ConfigError | Exit:
    """Return the error to raise when the folder of a run can't be read or written.

    If the store did not answer, the error is an Exit: a later start may succeed.
    """
    if not isinstance(error, StorageError):
        error = StorageError(run_dir, error, "read or written")
    if not error.is_permanent:
        return Exit(CRASHED, str(error))
    rule = f"cannot be read or written: {error.reason}. Name a folder that you may "
    return ConfigError([Mistake("run.dir", run_dir, f"{rule}read and write")])


def check_store(run_dir: epath.Path) -> None:
    """Check that the store of a run's folder answers, if the folder is remote.

    Raises:
        ConfigError: the store refuses access.
        Exit: the store does not answer.
    """
    if not is_remote(run_dir):
        return
    try:
        wait_for_answer(str(run_dir), (run_dir / "config.yaml").exists)
    except Exception as error:  # each client has its own kinds
        raise access_error(str(run_dir), error) from error


def check_layout(run_dir: epath.Path) -> None:
    """Check that all files of a local run are files, and all its folders are folders.

    Raises:
        DataError: an entry is of the wrong kind; the message names it.
        ConfigError: the folder cannot be searched.
    """
    if is_remote(run_dir):  # an object store has no folders
        return
    try:
        for name in _FILES:
            if is_taken(run_dir / name) and not Path(run_dir / name).is_file():
                raise _wrong_kind(run_dir / name, "file")
        for name in _SUBFOLDERS:
            if is_taken(run_dir / name) and not Path(run_dir / name).is_dir():
                raise _wrong_kind(run_dir / name, "folder")
        for name in _REAL_FOLDERS:
            _check_real_folder(run_dir / name)
        check_checkpoints(run_dir / "checkpoints")
    except PermissionError as error:
        raise access_error(str(run_dir), error) from None


def check_checkpoints(checkpoints: epath.Path) -> None:
    """Check what lies in a local folder of checkpoints, before it is opened.

    Orbax opens the descriptions of all steps. A start deletes and empties marks.

    Raises:
        DataError: an entry is of the wrong kind; the message names it.
    """
    if is_remote(checkpoints):
        return
    if is_taken(checkpoints) and not checkpoints.is_dir():
        raise _wrong_kind(checkpoints, "folder")
    for name in _REAL_CHECKPOINT_FOLDERS:
        _check_real_folder(checkpoints / name)
    marks = checkpoints / "unsealed"
    for mark in marks.iterdir() if marks.exists() else ():
        if Path(mark).is_symlink() or not mark.is_file():
            raise _wrong_kind(mark, "file, and not a link")
    for step in saved_steps(checkpoints):
        folder = checkpoints / str(step)
        _check_real_folder(folder)  # old steps are deleted
        try:
            check_regular(folder / DESCRIPTION)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise damaged(folder, str(error), "Move this folder elsewhere.") from None


def _check_real_folder(path: epath.Path) -> None:
    if is_taken(path) and not is_real_folder(path):
        raise _wrong_kind(path, "folder, and not a link")


def _wrong_kind(path: epath.Path, kind: str) -> DataError:
    return damaged(path, f"must be a {kind}", _REMEDY)
