"""Find the files of an input: a file, folder, glob or URL."""

import glob
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from data.errors import DataError
from data.storage import EXTRAS, StorageError, is_remote, wait_for_answer
from data.text.files import File, missing_package_error
from data.text.plain_text import TEXT
from data.text.saved_datasets import data_paths


def find_files(inputs: Sequence[str], pattern: str) -> list[File]:
    """Find the files of all inputs, in the order of their names.

    With several inputs, a file's name begins with the last component of its input's
    path, or with as many components as are necessary to make names unique.

    Args:
        inputs: files, folders and globs; local, or URLs that fsspec knows.
        pattern: which files of a folder are taken. Hidden files are skipped. Of a
            folder that `datasets` wrote, only the files with its data are taken.

    The files are not opened: their formats are not known yet. Raises DataError if an
    input is missing, holds nothing, holds several splits, or cannot be reached, and
    MissingPackageError if reaching it needs a missing package.
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
        except ImportError as error:
            scheme = str(entry).partition("://")[0]
            extra = {"hf": "data,hub"}.get(scheme, EXTRAS.get(scheme, "data"))
            package = error.name or f"for {scheme}://"
            raise missing_package_error(package, error, extra) from error
        except (OSError, ValueError, NotImplementedError) as error:
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
        files = [replace(file, input=str(entry)) for file in files]
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


def _find_files_of(entry: str, pattern: str) -> list[File]:
    is_local = not is_remote(entry)
    filesystem, path = fsspec.url_to_fs(
        str(Path(entry).expanduser()) if is_local else entry
    )
    exists = filesystem.exists(path) if is_local else _answers(filesystem, entry, path)
    if re.search(r"[*?[]", path) and not exists:
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
    shown = {}
    for info in infos.values():
        path = info["name"]
        name = path[len(root) :].lstrip("/")
        is_hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        # fsspec reports the type "other" for a symbolic link, whatever its target is.
        is_file_link = info.get("islink") and filesystem.isfile(path)
        if not is_hidden and (info["type"] == "file" or is_file_link):
            shown[path] = _file_of(filesystem, info, name)
    return [shown[path] for path in data_paths(filesystem, root, [*shown])]


def _answers(filesystem: Any, entry: str, path: str) -> bool:
    """Return whether a remote path exists.

    Raises StorageError if its server cannot be reached, or does not answer in time.
    """
    try:
        wait_for_answer(entry, lambda: filesystem.info(path))
    except FileNotFoundError as error:
        # The client of https says that a file is missing if its host is.
        reason = error.__cause__
        if isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError):
            raise StorageError(entry, reason, "read") from error
        return False
    return True


def _file_of(filesystem: Any, info: dict[str, Any], name: str) -> File:
    keys = ("mtime", "ETag", "etag", "md5Hash", "LastModified", "updated", "created")
    version = next((str(info[key]) for key in keys if info.get(key)), "")
    path = filesystem.unstrip_protocol(info["name"])
    size = int(info["size"] or 0)
    return File(path.removeprefix("file://"), name, size, version, TEXT)
