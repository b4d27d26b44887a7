"""Find the documents of a source and divide them into train and validation.

A folder (and the standard library) is divided by document, by a hash of each
document's id: adding a file moves no other one to the other side. A single file is
divided by place: its end is the validation text. Nothing is read before it is asked
for, and no document is in both splits.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.config import DataConfig, Source
from data.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

_NOT_LIBRARY = {"site-packages", "dist-packages"}
_NOT_LIBRARY |= {"test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Documents under one root, each with an id that is stable between machines."""

    root: Path  # the folder, or the single file
    ids: tuple[str, ...]  # paths relative to the folder, sorted
    validation: float  # the part that is held out

    @property
    def is_single_file(self) -> bool:
        """Whether one running text was divided, so that no document ends in it."""
        return self.root.is_file()

    def identity(self) -> str:
        """Hash the division, and path, size and time of every file; read none.

        Raises:
            DataError: a file is gone.
        """
        files = []
        for path in self._paths():
            try:
                stat = path.stat()
            except OSError as error:
                raise _unreadable(path, error) from error
            files.append((str(path), stat.st_size, stat.st_mtime_ns))
        return hashlib.sha256(json.dumps([self.validation, files]).encode()).hexdigest()

    def documents(self, split: Split) -> Iterator[tuple[str, bytes]]:
        """Yield (id, content) of a split's documents in the order of their ids.

        Raises:
            DataError: a file cannot be read, or the split would be empty.
        """
        if self.is_single_file:
            yield self.ids[0], self._part(split)
            return
        held_out = held_out_ids(self.ids, self.validation)
        for name, path in zip(self.ids, self._paths(), strict=True):
            if (name in held_out) == (split == "validation"):
                yield name, _read(path)

    def _paths(self) -> list[Path]:
        if self.is_single_file:
            return [self.root]
        return [self.root / name for name in self.ids]

    def _part(self, split: Split) -> bytes:
        text = _read(self.root)
        cut = len(text) - int(len(text) * self.validation)
        for _ in range(3):  # as many continuation bytes as a UTF-8 character can have
            if 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:
                cut -= 1
        part = text[:cut] if split == "train" else text[cut:]
        if not part:
            raise DataError(
                f"{self.root}: no byte is left for {split}, and both splits need text. "
                f"Use a longer file or change data.validation={self.validation}"
            )
        return part


def find_corpus(config: DataConfig) -> Corpus:
    """Find the documents that a config names, without reading them.

    Raises:
        DataError: the path is missing, or holds too few files.
    """
    if config.source is Source.python:
        root = Path(sysconfig.get_paths()["stdlib"])
        ids = _library_files(root)
    else:
        root = Path(config.path or "").expanduser().absolute()
        if root.is_file():
            return Corpus(root, (root.name,), config.validation)
        if not config.path or not root.is_dir():
            raise DataError(
                f"data.path={config.path}: there is no such file or folder. Name a "
                f"text file or a folder of text files"
            )
        ids = [
            name
            for name in _files(root, config.pattern)
            if not any(part.startswith(".") for part in Path(name).parts)
        ]
    if len(ids) < 2 and config.source is Source.python:
        raise DataError(
            f"{root}: Python's standard library is not there as source code. Name text "
            f"of your own with data=text data.path=..."
        )
    if len(ids) < 2:
        raise DataError(
            f"{root}: {len(ids)} files match data.pattern={config.pattern} (hidden "
            f"ones do not count), but train and validation need one each. Add files, "
            f"widen the pattern, or name a single file"
        )
    return Corpus(root, tuple(ids), config.validation)


def held_out_ids(ids: tuple[str, ...], fraction: float) -> set[str]:
    """Choose the validation documents: those whose id's hash falls under `fraction`.

    The lowest hash is always held out and the highest never, so that neither split
    is empty. `ids` holds at least two; their order does not matter.
    """
    hashes = {
        name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
        for name in ids
    }
    ranked = sorted(ids, key=hashes.__getitem__)
    chosen = {name for name in ids if hashes[name] < fraction}
    return (chosen | {ranked[0]}) - {ranked[-1]}


def _files(root: Path, pattern: str) -> list[str]:
    try:
        paths = [path for path in root.glob(pattern) if path.is_file()]
    except (OSError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"{root}: cannot be searched for data.pattern={pattern} ({error}). Use a "
            f"pattern relative to the folder, such as '**/*.txt'"
        ) from error
    return sorted(path.relative_to(root).as_posix() for path in paths)


def _library_files(root: Path) -> list[str]:
    # Not a glob: that would go through all installed packages, at every start.
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        relative = Path(folder).relative_to(root)
        found += [(relative / file).as_posix() for file in files if file[-3:] == ".py"]
    return sorted(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error}). Make it readable, or leave it out with "
        f"data.pattern"
    )
