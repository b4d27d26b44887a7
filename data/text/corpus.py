"""Find the files of an input and divide their documents into train and validation.

If several files are one document each, a hash of each file's name decides its split.
Added files therefore seldom change the split of the others, and neither split is empty
(`held_out_ids`). A single text is divided by position: its end is the validation text.
Records inside files are divided by a hash of each record's id (token_store/parts.py).
No document is in both splits, except a single text.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.config import DataConfig, Source
from data.errors import DataError
from data.splits import Split
from data.text.classify import classify
from data.text.documents import read_documents
from data.text.files import (
    File,
    Format,
    Unit,
    cut_file,
    hash_fraction,
    units_of,
    unreadable_error,
)
from data.text.find import find_files
from data.text.plain_text import TEXT
from data.text.records import BadRecord, ReadSettings, Record
from data.text.streams import align_to_character, text_size

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Files in the order of their names, and the fraction to hold out."""

    root: str  # the file, folder or pattern that the config names
    files: tuple[File, ...]
    validation: float  # the fraction that is held out
    left_out: tuple[File, ...] = ()  # files that cannot be read

    def identity(self) -> str:
        """Return a hash of `validation` and of every file's path, size and version."""
        files = [(file.path, file.size, file.version) for file in self.files]
        return hashlib.sha256(json.dumps([self.validation, files]).encode()).hexdigest()

    def units(self) -> list[Unit]:
        """Cut the files, in order, into units that are read independently.

        Raises DataError if a split of a single text would be empty.
        """
        if any(file.format != TEXT for file in self.files):
            return [unit for file in self.files for unit in units_of(file)]
        if len(self.files) == 1:
            return self._units_of_single_text()
        names = {file.name for file in self.files}
        if self.validation and len(names) < 2:
            raise DataError(
                f"{self.root}: is one text {len(self.files)} times, but both splits "
                f"need a text. Name it once"
            )
        held_out = held_out_ids(names, self.validation) if self.validation else set()
        units: list[Unit] = []
        for file in self.files:
            split = "validation" if file.name in held_out else "train"
            units += units_of(file, split)
        return units

    def classified(
        self,
        settings: ReadSettings,
        formats: Sequence[Format],
        skip_refused: bool,
        beat: Callable[[], object] = lambda: None,
    ) -> "Corpus":
        """Return the corpus with the formats of its files, as `classify` finds them."""
        files, refused = classify(self.files, settings, formats, skip_refused, beat)
        return replace(self, files=tuple(files), left_out=tuple(refused))

    def without_bad_files(self, beat: Callable[[], object]) -> "Corpus":
        """Return the corpus without text files that are damaged or not valid UTF-8.

        `beat` is called for each read from a file, to report progress. Raises DataError
        if no file is left.
        """
        good_files = []
        bad_files = []
        for file in self.files:
            records: Iterable[Record | BadRecord] = ()
            if file.format == TEXT:
                records = read_documents(Unit(file), ReadSettings(), lambda _: beat())
            is_bad = any(isinstance(record, BadRecord) for record in records)
            (bad_files if is_bad else good_files).append(file)
        if not good_files:
            raise DataError(
                f"{self.root}: none of its {len(bad_files)} files is text in UTF-8, so "
                f"data.on_error=skip leaves no file. Name other files"
            )
        left_out = (*self.left_out, *bad_files)
        return replace(self, files=tuple(good_files), left_out=left_out)

    def _units_of_single_text(self) -> list[Unit]:
        (file,) = self.files
        size = text_size(file)
        boundary = align_to_character(file, size - int(size * self.validation))
        ranges: list[tuple[int, int, Split]] = [(0, boundary, "train")]
        if self.validation:
            ranges.append((boundary, size, "validation"))
        units: list[Unit] = []
        for low, high, split in ranges:
            if low == high:
                raise DataError(
                    f"{file.path}: no byte is left for {split}, and both splits need "
                    f"text. Use a longer file, or change validation="
                    f"{self.validation} (data.validation in training)"
                )
            if file.compression:  # cannot be read from the middle
                units.append(Unit(file, low, high, low, high, split, marks_end=False))
            else:
                units += cut_file(file, low, high, split, marks_end=False)
        return units


def find_corpus(config: DataConfig) -> Corpus:
    """Find the files of text that a training config names, without opening them.

    The formats of the files at `data.path` are not known before `Corpus.classified`.
    Raises DataError if the path is missing, or holds no file.
    """
    if config.source is Source.python:
        root = sysconfig.get_paths()["stdlib"]
        try:
            files = _library_files(Path(root))
        except OSError as error:
            raise unreadable_error(root, error) from error
        if len(files) < 2:
            raise DataError(
                f"{root}: Python's standard library has no source code there. Name "
                f"text of your own with data=text data.path=..."
            )
    else:
        root = config.path or ""
        files = find_files([root], config.pattern)
    return Corpus(root, tuple(files), config.validation)


def held_out_ids(ids: set[str], fraction: float) -> set[str]:
    """Choose the validation documents: those whose id's hash is below `fraction`.

    The id with the lowest hash is always held out and the one with the highest never,
    so that neither split is empty. There must be at least two ids.
    """
    lowest, *others, _ = sorted(sorted(ids), key=hash_fraction)
    return {lowest} | {name for name in others if hash_fraction(name) < fraction}


def _library_files(root: Path) -> list[File]:
    # A glob would walk through all installed packages at every start.
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            stat = path.stat()
            name = path.relative_to(root).as_posix()
            version = str(stat.st_mtime)
            files.append(File(str(path), name, stat.st_size, version, TEXT))
    return sorted(files, key=lambda file: file.name)
