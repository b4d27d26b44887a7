"""Digests of a checkpoint's files: without them a flipped bit is silently trained on.

Orbax keeps no checksum of the bytes of arrays. So when a step has been written, all its
files are hashed, and `digests.json`, written last, seals it. A step is used only if
every file is there, has its size and its SHA-256, and there is no other file.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

from data.machine import is_remote
from train.run.storage import is_committed, names_in, write_whole

SEAL = "digests.json"
_BLOCK = 2**22
_THREADS = 4  # hashing releases the interpreter's lock; more hide a store's latency


def digests(
    step: epath.Path, part: int = 0, parts: int = 1, names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return size and SHA-256 of each file of a step, by its path in the folder.

    Several processes share the work: each hashes one `part` of `parts`. `names` are
    those of the files to hash; None: all.
    """
    names = sorted(_files(step) if names is None else names)[part::parts]
    with ThreadPoolExecutor(_THREADS) as pool:
        hashed = pool.map(lambda name: _digest(step / name), names)
        return dict(zip(names, hashed, strict=True))


def write_seal(step: epath.Path, hashed: Mapping[str, Any]) -> None:
    """Write the digests of all files beside them.

    Raises:
        OSError: also if the step is not there any more.
    """
    text = json.dumps(hashed, indent=1)
    if is_remote(step):
        (step / SEAL).write_text(text)
        if not is_committed(step):  # it has made way, for all but the seal
            (step / SEAL).unlink(missing_ok=True)
            raise FileNotFoundError(step)
        return
    # Beside the step: in it a file that is left behind would count as damage.
    write_whole(step / SEAL, text, step.parent / f".{step.name}.{SEAL}")


def saved_steps(checkpoints: epath.Path) -> list[int]:
    """List the steps that lie in a run's folder of checkpoints, ascending."""
    if not checkpoints.exists():
        return []
    return sorted(int(p.name) for p in checkpoints.iterdir() if p.name.isdigit())


def is_sealed(step: epath.Path) -> bool:
    """Return whether a step was hashed; not whether it is still what it was."""
    return (step / SEAL).exists()


def damage(step: epath.Path, part: int = 0, parts: int = 1) -> str | None:
    """Return what is wrong with a step; None if it is what was written.

    Several processes share the work, as in `digests`.
    """
    # A store that cannot be reached does not make a step a damaged one.
    unreadable = FileNotFoundError if is_remote(step) else OSError
    try:
        expected = json.loads((step / SEAL).read_text())
        if missing := expected.keys() ^ set(_files(step)):
            return f"{sorted(missing)[0]} is missing, or there and not of the step"
        for name, digest in digests(step, part, parts).items():
            if digest != expected[name]:
                return f"{name} is not what was written: its digest differs"
    except (unreadable, ValueError, AttributeError, TypeError) as error:
        return f"cannot be checked: {type(error).__name__}: {error}"
    return None


def size(step: epath.Path) -> int:
    """Return the number of bytes of a step."""
    return sum((step / name).stat().length for name in _files(step))


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    if is_remote(folder):
        yield from (name for name in names_in(folder) if name != SEAL)
        return
    for path in folder.iterdir():
        name = f"{prefix}{path.name}"
        if path.is_dir():
            yield from _files(path, f"{name}/")
        elif name != SEAL:
            yield name


def _digest(path: epath.Path) -> list[object]:
    """Return a file's size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]
