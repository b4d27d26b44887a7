"""The records of submissions in the run's directory: `<run.dir>/launch/<n>/`.

    record.json           kind, time, command line, job name, git commit
    config.yaml           all resolved keys, including those of the cluster
    uncommitted.patch     changes that were not committed to git, if any
    code.tar.gz unpack.py the code, if it is sent as an archive
    ...                   the rendered files

No secret is written: the configuration contains only the names of secrets.
"""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from etils import epath

from data.errors import DataError, Mistake
from data.names import checked_name, numbers_in
from data.program import PREFIX
from data.storage import StorageError, is_remote, write_atomically
from launch.job import ARCHIVE, local_folder
from train.errors import ConfigError, Exit
from train.masking import mask
from train.records import damaged, read_record
from train.run.folder import access_error

_FOLDER = "launch"
RECORD = "record.json"
_REMEDY = "Put it back from a copy, or move its folder away and submit again."


@dataclass(frozen=True)
class Submission:
    """One submission of a run.

    number: the submission's number in the run, from 1.
    name: the job's name on the cluster.
    arguments: the arguments of `python -m launch`.
    workdir: the folder in which the command was typed.
    handle: the values that identify the job on its cluster, such as an id.
    code: the SHA-256 of the code's archive, if there is one.
    run_name: the run's name.
    """

    run_dir: str
    number: int
    kind: str
    name: str
    arguments: tuple[str, ...]
    workdir: str
    time: str = ""
    git: Mapping[str, Any] = field(default_factory=dict)
    handle: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    run_name: str = ""

    @property
    def folder(self) -> epath.Path:
        """The folder of this submission."""
        return epath.Path(self.run_dir) / _FOLDER / str(self.number)

    def with_handle(self, **handle: Any) -> "Submission":
        """Add values to the handle and write the record; return the new submission."""
        submission = replace(self, handle={**self.handle, **handle})
        record = {k: v for k, v in asdict(submission).items() if k != "run_dir"}
        write_atomically(self.folder / RECORD, json.dumps(record, indent=1) + "\n")
        return submission

    def as_json(self, **values: Any) -> str:
        """Return one line of JSON with the record, the folder and further values."""
        folder = os.fspath(self.folder)
        return json.dumps({**asdict(self), "folder": folder, **values})

    def local_folder(self) -> Path:
        """Return `folder`, or a local folder if `folder` is remote; create it."""
        folder = local_folder(self.name, str(self.folder))
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def next_number(run_dir: str) -> int:
    """Return the number of the next submission."""
    # A folder without a record counts too: a user may have submitted rendered files.
    return max(_submission_numbers(run_dir), default=0) + 1


def folder_to_render(run_dir: str) -> epath.Path:
    """Return the next submission's folder, without a query to an object store.

    In an object store the submission's number is unknown, so `by-hand` replaces it.
    """
    number = "by-hand" if is_remote(run_dir) else str(next_number(run_dir))
    return epath.Path(run_dir) / _FOLDER / number


def newest_submission(run_dir: str) -> Submission | None:
    """Return the run's last submission, or None; raise DataError if it is damaged."""
    folder = epath.Path(run_dir) / _FOLDER
    for number in sorted(_submission_numbers(run_dir), reverse=True):
        record = folder / str(number) / RECORD
        with _explain_access_errors(run_dir):
            record_values = read_record(record, _REMEDY)
        if record_values is not None:
            try:
                return _submission(record_values | {"number": number}, run_dir)
            except (KeyError, TypeError, ValueError):
                raise damaged(record, "is not a submission", _REMEDY) from None
    return None


def _submission(record_values: dict[str, Any], run_dir: str) -> Submission:
    """Return the submission that a record describes.

    Raises:
        KeyError, TypeError, ValueError: the values do not describe one.
    """
    arguments = tuple(map(str, record_values.pop("arguments")))
    submission = Submission(run_dir, arguments=arguments, **record_values)
    if "/" in checked_name(submission.name):  # it is part of a path
        raise ValueError(submission.name)
    for table in (submission.git, submission.handle):
        if not isinstance(table, dict):
            raise TypeError(table)
    return submission


def require_submission(run_dir: str) -> Submission:
    """Return the run's last submission; raise ConfigError if there is none."""
    submission = newest_submission(run_dir)
    if submission is None:
        rule = f"was never submitted: there is no {run_dir}/{_FOLDER}. Name a run that "
        rule += "was, by run.name, run.dir or the keys of its submission"
        raise ConfigError([Mistake("run.dir", run_dir, rule)])
    return submission


def _submission_numbers(run_dir: str) -> list[int]:
    from data.key_value_store import check_answers  # imports TensorStore

    folder = epath.Path(run_dir) / _FOLDER
    with _explain_access_errors(run_dir):
        check_answers(run_dir)
        names = [f.name for f in folder.iterdir()] if folder.exists() else []
    return numbers_in(names)


@contextmanager
def _explain_access_errors(run_dir: str) -> Iterator[None]:
    """Turn a failure to access a run's folder into an error with advice for users."""
    try:
        yield
    except Exception as error:  # each object store's client has its own errors
        is_explained = isinstance(error, (Exit, ConfigError, DataError))
        if is_explained and not isinstance(error, StorageError):
            raise
        raise access_error(run_dir, error) from error


def write_submission(
    submission: Submission, files: Mapping[str, str | bytes], root: Path
) -> Submission:
    """Write a submission's files and record, with the git state of the code."""
    commit, patch = _git_state(root)
    files = {**files, **({"uncommitted.patch": mask(patch)} if patch else {})}
    with _explain_access_errors(submission.run_dir):
        write_files(submission.folder, files)
    content = files.get(ARCHIVE)
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    digest = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else None
    return replace(submission, git=commit, code=digest, time=timestamp).with_handle()


def write_files(folder: epath.Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a folder, which is created if necessary."""
    for name, content in files.items():
        write_atomically(folder / name, content)


def _git_state(root: Path) -> tuple[dict[str, Any], str]:
    """Return the commit and untracked files, and the patch; ({}, "") if installed."""
    if PREFIX:  # A repository around an installed copy belongs to another project.
        return {}, ""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)

    try:
        commit = git("rev-parse", "HEAD").strip()
        patch = git("diff", "--binary", "HEAD", "--", ".")
        untracked = git("ls-files", "--others", "--exclude-standard", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return {}, ""
    return {"commit": commit, "untracked": untracked.split("\n")[:-1]}, patch
