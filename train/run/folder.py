"""Find the folder of a run, check its layout, and explain why it is inaccessible."""

from pathlib import Path

from etils import epath

from data.storage import StorageError, is_remote, storage_path
from train.errors import CRASHED, ConfigError, Exit, Mistake
from train.run.records import damaged

_FILES = (
    *("config.yaml", "lease.json", "metrics.jsonl", "events.jsonl", "results.json"),
    *("init_from.json", "branch.json", "profile_request.json"),
)
_SUBFOLDERS = (
    *("starts", "checkpoints", "metrics", "events", "evaluations", "profiles"),
    *("stacks", "launch"),
)


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


def check_layout(run_dir: epath.Path) -> None:
    """Check that all files of a local run are files, and all its folders are folders.

    Raises:
        DataError: an entry is of the wrong kind; the message names it.
        ConfigError: the folder cannot be searched.
    """
    if is_remote(run_dir):  # an object store has no folders
        return
    for name in (*_FILES, *_SUBFOLDERS):
        path, kind = Path(run_dir / name), "folder" if name in _SUBFOLDERS else "file"
        try:
            is_kind = path.is_dir() if kind == "folder" else path.is_file()
            is_wrong_kind = path.exists() and not is_kind
        except PermissionError as error:
            raise access_error(str(run_dir), error) from None
        if is_wrong_kind:
            remedy = "Move it away, or put back what a copy of the run has there."
            raise damaged(epath.Path(path), f"must be a {kind}, and is not", remedy)
