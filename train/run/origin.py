"""The record of where a branch began: `branch.json` in its directory."""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from data.errors import DataError
from data.storage import write_atomically
from train.records import read_record
from train.run.digests import newest_description

RECORD = "branch.json"


def read_origin(path: epath.Path) -> dict[str, Any] | None:
    """Return the content of a branch's `branch.json`; None if the run is not a branch.

    If the file is missing or damaged, the newest checkpoint provides the content.
    """
    if (origin := recorded_origin(path)) is not None:
        return origin
    return _checked(newest_description(path / "checkpoints")[1].get("branch"))


def recorded_origin(path: epath.Path) -> dict[str, Any] | None:
    """Return the content of `branch.json`; None if it is missing or damaged."""
    try:
        return _checked(read_record(path / RECORD, ""))
    except DataError:
        return None


def _checked(origin: Any) -> dict[str, Any] | None:
    """Return the content of a `branch.json`; None if its types are wrong."""
    is_whole = (
        isinstance(origin, dict)
        and isinstance(origin.get("run"), str)
        and isinstance(origin.get("step"), int)
        and isinstance(origin.get("config"), str)
    )
    return origin if is_whole else None


def write_origin(path: epath.Path, origin: Mapping[str, Any]) -> None:
    """Write `branch.json`.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(path / RECORD, json.dumps(origin, indent=1) + "\n")
