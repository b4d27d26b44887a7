"""Find the data in folders that Hugging Face's `datasets` writes.

`save_to_disk` writes dataset_dict.json, which names the splits, each a folder, and in
each folder state.json, which names the files of the data. `map` leaves its results next
to them, as cache-<hash>.arrow: they are the same documents again. The cache of
`load_dataset` holds <builder>-<split>.arrow and dataset_info.json. Published folders
hold files such as train-00000-of-00002.parquet.
Source: datasets 5.2, arrow_dataset.py and dataset_dict.py.
"""

import functools
import json
import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from data.errors import DataError

_log = logging.getLogger(__name__)

_CACHE_NAME = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_PUBLISHED_NAME = re.compile(
    r"(?:.*[-_.])?(train|training|test|testing|validation|valid|val|dev|eval)"
    r"-\d{5}-of-\d{5}(?:-\w+)?\.\w+(?:\.\w+)?"
)


class _Split(NamedTuple):
    """A split of a data set, and what to type to read it alone."""

    dataset: str
    name: str
    remedy: str


def data_paths(filesystem: Any, root: str, paths: Sequence[str]) -> list[str]:
    """Return the paths below a root that hold data, without what else is there.

    Raises DataError if the paths belong to several splits of a data set, a file that
    state.json names is missing, or the data is a selection by indices.
    """
    folders = _Folders(filesystem, root)
    by_folder = defaultdict[str, list[str]](list)
    for path in paths:
        by_folder[_parent(path)].append(path)
    kept = {path for group in by_folder.items() for path in folders.data_of(*group)}
    splits = {path: folders.split_of(path) for path in kept}
    by_dataset = defaultdict[str, set[_Split]](set)
    for split in splits.values():
        if split is not None:
            by_dataset[split.dataset].add(split)
    for dataset, found in by_dataset.items():
        if len(found) > 1:
            listed = "\n".join(f"    {s.name}: {s.remedy}" for s in sorted(found))
            raise DataError(
                f"{dataset}: holds {len(found)} splits of one data set, and would be "
                f"read as one text. Name one of them as the input (data.path in "
                f"training):\n{listed}"
            )
    if left_out := sorted({*paths} - kept):
        message = "%d files that the library datasets wrote next to its data are left "
        _log.info(message + "out, such as %s", len(left_out), left_out[0])
    return [path for path in paths if path in kept]


class _Folders:
    """The folders of an input, whose small files are read at most once."""

    def __init__(self, filesystem: Any, root: str):
        self._filesystem = filesystem
        self._root = root
        self._read_json = functools.cache(self._load_json)

    def data_of(self, folder: str, members: list[str]) -> list[str]:
        """Return the members of a folder that hold data."""
        names = {PurePosixPath(path).name: path for path in members}
        has_arrow = any(name.endswith(".arrow") for name in names)
        if not has_arrow and "state.json" not in names:
            return members
        dataset = _parent(folder)
        name = PurePosixPath(folder).name
        splits = self._read_json(dataset, "dataset_dict.json").get("splits")
        is_inside = dataset == self._root or dataset.startswith(f"{self._root}/")
        if isinstance(splits, list) and is_inside and name not in splits:
            return []
        state = self._read_json(folder, "state.json")
        if "_data_files" not in state:
            others = [p for name, p in names.items() if not _CACHE_NAME.fullmatch(name)]
            has_data = any(path.endswith(".arrow") for path in others)
            return others if has_data else members
        try:
            named = {str(file["filename"]) for file in state["_data_files"]}
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{folder}/state.json: is damaged: it should name the files of a data "
                f"set. Copy the whole folder again, or name its .arrow files as inputs"
            ) from error
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(
                f"{folder}: is a selection of rows, which state.json describes by "
                f"indices. Save the rows themselves: datasets.load_from_disk(...)."
                f"flatten_indices().save_to_disk(...)"
            )
        for name in sorted(named - {*names}):
            if not self._filesystem.exists(f"{folder}/{PurePosixPath(name).name}"):
                raise DataError(
                    f"{folder}: state.json names the file {name}, which is not there. "
                    f"Copy the whole folder again"
                )
        return [path for name, path in names.items() if name in named]

    def split_of(self, path: str) -> _Split | None:
        """Return the split of a data set to which a file belongs, if it is known."""
        folder = _parent(path)
        name = PurePosixPath(path).name
        if name.endswith(".arrow"):
            splits = self._read_json(_parent(folder), "dataset_dict.json").get("splits")
            if isinstance(splits, list):
                return _Split(_parent(folder), PurePosixPath(folder).name, folder)
            splits = self._read_json(folder, "dataset_info.json").get("splits")
            for split in splits if isinstance(splits, dict) else ():
                if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", name):
                    return _Split(folder, split, f"'{folder}/*-{split}*.arrow'")
        if match := _PUBLISHED_NAME.fullmatch(name):
            return _Split(folder, match[1], f"'{folder}/*{match[1]}-*'")
        return None

    def _load_json(self, folder: str, name: str) -> dict[str, Any]:
        """Return the object in a small file; an empty one if it cannot be read."""
        try:
            content = json.loads(self._filesystem.cat_file(f"{folder}/{name}"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
