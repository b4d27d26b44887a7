"""Find the files of an input and divide their documents into train and validation.

If several files are one document each, a hash of each file's name decides its split.
Added files therefore seldom change the split of the others, and neither split is empty
(`held_out_ids`). A single text is divided by position: its end is the validation text.
Records inside files are divided by a hash of each record's id (token_store/parts.py).
No document is in both splits, except a single text.
"""

import glob
import hashlib
import json
import logging
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from data.config import DataConfig, Source
from data.errors import DataError
from data.storage import is_remote
from data.text.documents import read_documents
from data.text.files import (
    File,
    Format,
    Split,
    Unit,
    cut_file,
    hash_fraction,
    units_of,
    unreadable_error,
)
from data.text.records import BadRecord, ReadSettings, Record
from data.text.streams import align_to_character, text_size

log = logging.getLogger(__name__)

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Files in the order of their names, and the fraction to hold out."""

    root: str  # the file, folder or pattern that the config names
    files: tuple[File, ...]
    validation: float  # the fraction that is held out
    left_out: tuple[File, ...] = ()  # files that are not text

    def identity(self) -> str:
        """Return a hash of `validation` and of every file's path, size and version."""
        files = [(file.path, file.size, file.version) for file in self.files]
        return hashlib.sha256(json.dumps([self.validation, files]).encode()).hexdigest()

    def units(self) -> list[Unit]:
        """Cut the files, in order, into units that are read independently.

        Raises DataError if a split of a single text would be empty.
        """
        if any(file.format is not Format.text for file in self.files):
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

    def without_bad_files(self, beat: Callable[[], object]) -> "Corpus":
        """Return the corpus without text files that are damaged or not valid UTF-8.

        `beat` is called for each read from a file, to report progress. Raises DataError
        if no file is left.
        """
        good_files, bad_files = [], []
        for file in self.files:
            records: Iterable[Record | BadRecord] = ()
            if file.format is Format.text:
                records = read_documents(Unit(file), ReadSettings(), lambda _: beat())
            is_bad = any(isinstance(record, BadRecord) for record in records)
            (bad_files if is_bad else good_files).append(file)
        if not good_files:
            raise DataError(
                f"{self.root}: none of its {len(bad_files)} files is text in UTF-8, so "
                f"data.on_error=skip leaves no file. Name other files"
            )
        return replace(self, files=tuple(good_files), left_out=tuple(bad_files))

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
    """Find the files of text that a training config names, without reading them.

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


def find_files(inputs: Sequence[str], pattern: str) -> list[File]:
    """Find the files of all inputs, in the order of their names.

    With several inputs, a file's name begins with the last component of its input's
    path, or with as many components as are necessary to make names unique.

    Args:
        inputs: files, folders and globs; local, or URLs that fsspec knows.
        pattern: which files of a folder are taken. Hidden files are skipped. If some
            files of an input hold records (.jsonl, .parquet, .arrow), its other files
            are skipped.

    Raises DataError if an input is missing, holds nothing or cannot be reached.
    """
    files_by_folder: list[tuple[list[str], File]] = []
    for entry in inputs:
        try:
            files = _find_files_of(str(entry), pattern)
        except FileNotFoundError as error:
            raise DataError(
                f"{entry}: there is no such file or folder. Name a text file, a folder "
                f"of them, or a pattern such as 'corpus/*.jsonl'"
            ) from error
        except (OSError, ValueError, NotImplementedError, ImportError) as error:
            raise DataError(
                f"{entry}: cannot be searched for {pattern} ({error}). Use a path or "
                f"URL that can be read, and a pattern inside it such as '**/*.txt'"
            ) from error
        if not files:
            raise DataError(
                f"{entry}: 0 files match the pattern {pattern} (hidden ones do not "
                f"count). Add files, widen the pattern, or name a single file"
            )
        prefix = PurePosixPath(entry.rstrip("/")).name
        if len(inputs) > 1 and [file.name for file in files] != [prefix]:
            files = [replace(file, name=f"{prefix}/{file.name}") for file in files]
        folders = _folders_of(entry)
        files_by_folder += [(folders, file) for file in files]
    return sorted(_with_unique_names(files_by_folder), key=lambda file: file.name)


def _folders_of(entry: str) -> list[str]:
    """Return the names of the folders that contain an input, outermost first."""
    if is_remote(entry):
        return [*PurePosixPath(entry).parts[:-1]]
    # Resolve ".." but not symbolic links.
    path = os.path.normpath(Path(entry).expanduser().absolute())
    return [*PurePosixPath(path).parts[1:-1]]


def _with_unique_names(files_by_folder: list[tuple[list[str], File]]) -> list[File]:
    """Make the names of files unique by prefixing as many folders as necessary.

    Names that are already unique do not change, because the document ids of existing
    stores begin with them.
    """
    same_name = defaultdict[str, list[tuple[list[str], File]]](list)
    for folders, file in files_by_folder:
        same_name[file.name].append((folders, file))
    counts = {n: len({f.path for _, f in group}) for n, group in same_name.items()}
    used_names = {name for name, count in counts.items() if count == 1}
    renamed = [file for name in used_names for _, file in same_name[name]]
    for name in sorted(same_name.keys() - used_names):
        group = same_name[name]
        for depth in range(1, 2 + max(len(folders) for folders, _ in group)):
            new_names = ["/".join([*folders[-depth:], name]) for folders, _ in group]
            if len({*new_names}) == counts[name] and not used_names & {*new_names}:
                break
        used_names |= {*new_names}
        pairs = zip(group, new_names, strict=True)
        renamed += [replace(file, name=new_name) for (_, file), new_name in pairs]
    return renamed


def held_out_ids(ids: set[str], fraction: float) -> set[str]:
    """Choose the validation documents: those whose id's hash is below `fraction`.

    The id with the lowest hash is always held out and the one with the highest never,
    so that neither split is empty. There must be at least two ids.
    """
    lowest, *others, _ = sorted(sorted(ids), key=hash_fraction)
    return {lowest} | {name for name in others if hash_fraction(name) < fraction}


def _find_files_of(entry: str, pattern: str) -> list[File]:
    is_local = not is_remote(entry)
    filesystem, path = fsspec.url_to_fs(
        str(Path(entry).expanduser()) if is_local else entry
    )
    if re.search(r"[*?[]", path) and not filesystem.exists(path):
        root = re.split(r"[*?[]", path)[0].rpartition("/")[0]
        infos = filesystem.glob(path, detail=True)
    elif filesystem.isfile(path):
        return [_file_of(filesystem, filesystem.info(path), PurePosixPath(path).name)]
    else:
        root = path.rstrip("/")
        if not filesystem.isdir(path):
            raise FileNotFoundError(path)
        if pattern.startswith("/"):
            raise ValueError("the pattern is an absolute path")
        infos = filesystem.glob(f"{glob.escape(root)}/{pattern}", detail=True)
    files = []
    for info in infos.values():
        name = info["name"][len(root) :].lstrip("/")
        is_hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        # fsspec reports the type "other" for a symbolic link, whatever its target is.
        is_file_link = info.get("islink") and filesystem.isfile(info["name"])
        if not is_hidden and (info["type"] == "file" or is_file_link):
            files.append(_file_of(filesystem, info, name))
    text_names = [file.name for file in files if file.format is Format.text]
    if text_names and len(text_names) < len(files):
        message = "%s: %d files that hold no records are left out, such as %s; to "
        message += "encode them too, name them as another input"
        log.warning(message, entry, len(text_names), text_names[0])
        return [file for file in files if file.format is not Format.text]
    return files


def _file_of(filesystem: Any, info: dict[str, Any], name: str) -> File:
    keys = ("mtime", "ETag", "etag", "md5Hash", "LastModified", "updated", "created")
    version = next((str(info[key]) for key in keys if info.get(key)), "")
    path = filesystem.unstrip_protocol(info["name"])
    return File(path.removeprefix("file://"), name, int(info["size"] or 0), version)


def _library_files(root: Path) -> list[File]:
    # A glob would walk through all installed packages at every start.
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            stat, name = path.stat(), path.relative_to(root).as_posix()
            files.append(File(str(path), name, stat.st_size, str(stat.st_mtime)))
    return sorted(files, key=lambda file: file.name)
