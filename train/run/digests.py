"""Digests of a checkpoint's files, so that no run trains on a flipped bit unnoticed.

Orbax stores no checksums of arrays. When a step has been written, all its files are
hashed, and the digests are written to `digests.json`, which seals the step. A step is
used only if every file has the recorded size and SHA-256, and there is no other file.

One of the sealed files, the description, has the step's number, its run and its config.
A step is not used if its description has another number than its folder, or another
run.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

from data.names import checked_name, numbers_in
from data.storage import (
    check_regular,
    copy_file,
    file_below,
    is_real_folder,
    is_remote,
    list_files,
    remove_tree,
    write_atomically,
)

SEAL = "digests.json"
_COMMITTED = "commit_success.txt"  # Orbax's last file of a step, under gs:// and s3://
DESCRIPTION = "_CHECKPOINT_METADATA"  # the file in which Orbax saves our metadata
_BLOCK = 2**22
_THREADS = 4  # useful because hashing releases the GIL, and reads wait for a store


def digests(
    step: epath.Path,
    process: int = 0,
    processes: int = 1,
    names: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return the size and SHA-256 of each file of a step, by path relative to the step.

    Each of `processes` hashes only its share of `names`, which is all files if None.

    Raises:
        ValueError: a name is not that of a file below the folder.
        OSError: a file cannot be read.
    """
    names = sorted(_files(step) if names is None else names)[process::processes]
    with ThreadPoolExecutor(_THREADS) as pool:
        results = pool.map(lambda name: _digest(file_below(step, name)), names)
        return dict(zip(names, results, strict=True))


def write_seal(step: epath.Path, file_digests: Mapping[str, Any]) -> None:
    """Seal a step by writing the digests of all its files.

    Raises:
        OSError: the seal cannot be written, or retention has deleted the step.
    """
    text = json.dumps(file_digests, indent=1)
    if is_remote(step):
        (step / SEAL).write_text(text)
        if not is_committed(step):  # retention has deleted the step meanwhile
            (step / SEAL).unlink(missing_ok=True)
            raise FileNotFoundError(step)
        return
    # The temporary file is outside the step: inside, a leftover would count as damage.
    write_atomically(step / SEAL, text, step.parent / f".{step.name}.{SEAL}")


def copy_step(
    step: epath.Path,
    target: epath.Path,
    changes: Mapping[str, Any],
    beat: Callable[[], object],
) -> None:
    """Copy a sealed step, with other values in its description.

    The copy keeps the recorded digests of all other files, and is sealed last. `beat`
    is called after each file. What an interrupted copy left is removed.

    Raises:
        OSError: a file cannot be copied, for example because the step was deleted.
        ValueError: the seal or the description is damaged.
    """
    seal = _read_seal(step)
    if not is_remote(target):
        remove_tree(Path(target))
    for name in seal:
        copy_file(step / name, target / name)
        beat()
    description = _read_json(target / DESCRIPTION)
    description["custom_metadata"] |= changes
    write_atomically(target / DESCRIPTION, json.dumps(description))
    write_seal(target, seal | digests(target, names=[DESCRIPTION]))


def saved_steps(checkpoints: epath.Path) -> list[int]:
    """List the steps in a run's folder of checkpoints, ascending."""
    if not checkpoints.exists():
        return []
    return numbers_in(path.name for path in checkpoints.iterdir())


def unsealed_mark(directory: epath.Path, step: int) -> epath.Path:
    """Return the file whose presence says that a step may still lack its seal."""
    return directory / "unsealed" / str(step)


def is_sealed(step: epath.Path) -> bool:
    """Return whether a step has a seal; `find_damage` verifies the files."""
    return (step / SEAL).exists()


def unsealed_steps(
    directory: epath.Path, steps: Sequence[int], clean: bool
) -> list[int]:
    """Return the steps whose process died before their files were hashed.

    If `clean`, remove the marks of steps that were sealed or never written.
    """
    unsealed = [
        step
        for step in steps
        if not is_sealed(directory / str(step))
        and unsealed_mark(directory, step).exists()
    ]
    marks = unsealed_mark(directory, 0).parent
    if clean and marks.exists() and is_real_folder(marks):
        for mark in marks.iterdir():
            if mark.name not in map(str, unsealed):
                mark.unlink(missing_ok=True)
    return unsealed


def is_committed(step: epath.Path) -> bool:
    """Return whether Orbax has written all files of a remote step."""
    return (step / _COMMITTED).exists()


def remove_uncommitted(checkpoints: epath.Path) -> None:
    """Remove the remote steps that interrupted saves left incomplete.

    Orbax can do this, but would also remove the folders of quarantined steps.
    """
    if checkpoints.exists():
        for folder in checkpoints.iterdir():
            if numbers_in([folder.name]) and not is_committed(folder):
                folder.rmtree(missing_ok=True)


def find_damage(step: epath.Path, process: int = 0, processes: int = 1) -> str | None:
    """Return how a step differs from what was written; None if it does not.

    Each process checks a share of the files, as in `digests`.
    """
    try:
        expected = _read_seal(step)
        if unmatched := expected.keys() ^ set(_files(step)):
            return f"{sorted(unmatched)[0]} is missing, or does not belong to the step"
        for name, digest in digests(step, process, processes).items():
            if digest != expected[name]:
                return f"{name} is not what was written: its digest differs"
    except _damage_errors(step) as error:
        return f"cannot be checked: {type(error).__name__}: {error}"
    return None


def refusal(
    step: epath.Path, process: int = 0, processes: int = 1, run_id: str | None = None
) -> str | None:
    """Return why a step cannot be used (`is damaged: ...`); None if it can."""
    if difference := find_damage(step, process, processes):
        return f"is damaged: {difference}"
    reason = misplacement(step, run_id)
    return reason and f"does not belong there: {reason}"


def misplacement(step: epath.Path, run_id: str | None = None) -> str | None:
    """Return why a step does not belong in its folder; None if it does.

    The identity of the run is not checked if `run_id` is None.
    """
    return _description_mismatch(int(step.name), read_description(step) or {}, run_id)


def read_description(step: epath.Path) -> dict[str, Any] | None:
    """Return the description that was saved with a step; {} if there is none.

    Returns None if the description is damaged.
    """
    try:
        if is_sealed(step):
            digest = _digest(file_below(step, DESCRIPTION))
            if digest != _read_seal(step).get(DESCRIPTION):
                return None
        elif not (step / DESCRIPTION).exists():
            return {}
        metadata = _read_json(step / DESCRIPTION)
        return dict(metadata.get("custom_metadata") or {})
    except _damage_errors(step):
        return None


def newest_description(
    checkpoints: epath.Path, run_id: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the newest step, and the newest description, which may be an older step's.

    Damaged descriptions and steps of other runs are skipped. On an object store, a step
    without a description counts only if it is sealed: an interrupted save may leave an
    unsealed folder. Returns 0 and {} if there is no step.
    """
    newest = 0
    for step in reversed(saved_steps(checkpoints)):
        folder = checkpoints / str(step)
        description = read_description(folder)
        if description is None or _description_mismatch(step, description, run_id):
            continue
        if description:
            return newest or step, description
        if not is_remote(folder) or is_sealed(folder):
            newest = newest or step
    return newest, {}


def step_bytes(step: epath.Path) -> int:
    """Return the number of bytes in the files of a step."""
    return sum((step / name).stat().length for name in _files(step))


def _description_mismatch(
    step: int, description: Mapping[str, Any], run_id: str | None
) -> str | None:
    if not description:  # an interrupted save may have written none
        return None
    if (saved_step := description.get("step")) != step:
        return f"it holds step {saved_step}. Give its folder that name"
    if run_id is not None and description.get("run_id") != run_id:
        return "it was saved by another run"
    return None


def _damage_errors(step: epath.Path) -> tuple[type[Exception], ...]:
    """Return the exceptions that mean that a file of a step is damaged."""
    # Other errors of a store may only mean that it cannot be reached.
    os_error = FileNotFoundError if is_remote(step) else OSError
    return os_error, ValueError, AttributeError, TypeError


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    if is_remote(folder):
        yield from (name for name in list_files(folder) if name != SEAL)
        return
    for path in folder.iterdir():
        name = f"{prefix}{path.name}"
        if is_real_folder(path):
            yield from _files(path, f"{name}/")
        elif name != SEAL:
            yield name


def _digest(path: epath.Path) -> list[object]:
    """Return a file's size and SHA-256."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


def _read_seal(step: epath.Path) -> dict[str, Any]:
    """Return the recorded digest of each file of a step, by checked names."""
    seal = _read_json(step / SEAL)
    return {checked_name(name): digest for name, digest in seal.items()}


def _read_json(path: epath.Path) -> dict[str, Any]:
    check_regular(path)
    try:
        table = json.loads(path.read_text())
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path.name} does not hold names and values")
    return table
