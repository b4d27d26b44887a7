"""The records of submissions in the run's directory: `<run.dir>/launch/<n>/`.

    record.json           kind, time, command line, job, git commit
    config.yaml           all resolved keys, including those of the cluster
    uncommitted.patch     changes that git did not have yet, if there were any
    code.tar.gz unpack.py the code, if it is sent as an archive
    ...                   the rendered files

No secret is written: the configuration holds names of secrets only.
"""

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from etils import epath

from data.errors import DataError
from data.storage import StorageError, is_remote
from launch.job import ARCHIVE, local_folder
from train.errors import ConfigError, Exit, Mistake
from train.run.folder import access_error
from train.run.records import damaged, read_record

_FOLDER, RECORD = "launch", "record.json"
_REMEDY = "Put it back from a copy, or move its folder away and submit again."


@dataclass(frozen=True)
class Submission:
    """A submission.

    number: counts the run's submissions from 1 on.
    name: the name of the job.
    arguments: the arguments of `python -m launch`.
    workdir: the folder in which that was typed.
    handle: how the cluster knows the job: an id, a name.
    code: the SHA-256 of the code's archive, if it travels as one.
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

    @property
    def folder(self) -> epath.Path:
        """The folder of this submission."""
        return epath.Path(self.run_dir) / _FOLDER / str(self.number)

    def with_handle(self, **handle: Any) -> "Submission":
        """Write the record, with how the cluster knows the job."""
        submission = replace(self, handle={**self.handle, **handle})
        record = {k: v for k, v in asdict(submission).items() if k != "run_dir"}
        (self.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        return submission

    def local_folder(self) -> Path:
        """Return a local folder: the submission's own, unless that is remote."""
        folder = local_folder(self.name, str(self.folder))
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def next_number(run_dir: str) -> int:
    """Return the number of the next submission."""
    # Folders without a record count too: someone may have submitted rendered files.
    return max(_numbers(run_dir), default=0) + 1


def folder_to_render(run_dir: str) -> epath.Path:
    """Return the folder that `submit` would use next; an object store is not asked."""
    number = "by-hand" if is_remote(run_dir) else str(next_number(run_dir))
    return epath.Path(run_dir) / _FOLDER / number


def newest(run_dir: str) -> Submission | None:
    """Read the run's last submission, if any; raise DataError if it is damaged."""
    folder = epath.Path(run_dir) / _FOLDER
    for number in sorted(_numbers(run_dir), reverse=True):
        record = folder / str(number) / RECORD
        with _accessible(run_dir):
            record_values = read_record(record, _REMEDY)
        if record_values is not None:
            try:
                arguments = tuple(record_values.pop("arguments"))
                return Submission(run_dir, arguments=arguments, **record_values)
            except (KeyError, TypeError):
                raise damaged(record, "is no submission", _REMEDY) from None
    return None


def submitted(run_dir: str) -> Submission:
    """Read the run's last submission; raise ConfigError if there is none."""
    submission = newest(run_dir)
    if submission is None:
        rule = f"was never submitted: there is no {run_dir}/{_FOLDER}. Name a run that "
        rule += "was, with run.name, run.dir or the keys that it was submitted with"
        raise ConfigError([Mistake("run.dir", run_dir, rule)])
    return submission


def _numbers(run_dir: str) -> list[int]:
    from data.key_value_store import check_answers  # imports TensorStore

    folder = epath.Path(run_dir) / _FOLDER
    with _accessible(run_dir):
        check_answers(run_dir)
        names = [f.name for f in folder.iterdir()] if folder.exists() else []
    return [int(name) for name in names if name.isdigit()]


@contextmanager
def _accessible(run_dir: str) -> Iterator[None]:
    """Turn the failure to read or write a run's folder into an error for people."""
    try:
        yield
    except Exception as error:  # each store's client has errors of its own
        is_explained = isinstance(error, (Exit, ConfigError, DataError))
        if is_explained and not isinstance(error, StorageError):
            raise
        raise access_error(run_dir, error) from error


def keep(
    submission: Submission, files: Mapping[str, str | bytes], root: Path
) -> Submission:
    """Write a submission down, with the state of the code in git."""
    commit, patch = _git(root)
    files = {**files, **({"uncommitted.patch": patch} if patch else {})}
    with _accessible(submission.run_dir):
        write_files(submission.folder, files)
    code, now = files.get(ARCHIVE), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    sha = hashlib.sha256(code).hexdigest() if isinstance(code, bytes) else None
    return replace(submission, git=commit, code=sha, time=now).with_handle()


def write_files(folder: epath.Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)


def _git(root: Path) -> tuple[dict[str, Any], str]:
    """Return the commit, and what differs from it; nothing where there is no git."""

    def ask(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)

    try:
        commit = ask("rev-parse", "HEAD").strip()
        patch = ask("diff", "--binary", "HEAD", "--", ".")
        unknown = ask("ls-files", "--others", "--exclude-standard", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return {}, ""
    return {"commit": commit, "untracked": unknown.split("\n")[:-1]}, patch
