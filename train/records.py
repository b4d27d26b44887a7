"""Read the small files of a run, each of which is a table of names and values.

Only this module parses these files, except for config.yaml (train/cli/schema.py). So
every file that is empty, torn, neither JSON nor YAML, or a folder raises the same kind
of error.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from data.errors import DataError
from data.storage import is_remote
from train.cli.plain_yaml import check_complete, parse_yaml
from train.masking import mask_output

log = logging.getLogger(__name__)


def read_record(file: epath.Path, remedy: str) -> dict[str, Any] | None:
    """Return the table in a file, YAML or JSON by its name; None if there is no file.

    Args:
        file: local or remote.
        remedy: a sentence that says what to do about a damaged file.

    Raises:
        DataError: the file is damaged. The message names it, the damage and the remedy.
    """
    if not is_remote(file) and file.exists() and not Path(file).is_file():
        raise damaged(file, "is not a file", "Move it away.")
    try:
        text = file.read_bytes().decode()
        if not text.strip("\0 \n"):
            raise ValueError("is empty")
        if file.suffix == ".yaml":
            table = parse_yaml(text)
            check_complete(text)
        else:
            table = json.loads(text)
        if not isinstance(table, dict):
            raise ValueError("does not hold a table of names and values")
        return table
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        remedy = "Give this user the permission to read it."
        raise damaged(file, "may not be read", remedy) from None
    except OSError as error:  # such as a link to itself, or a disk that fails
        if is_remote(file):
            raise
        raise damaged(file, f"cannot be read ({error.strerror})", remedy) from None
    except RecursionError:
        raise damaged(file, "is nested too deeply", remedy) from None
    except UnicodeDecodeError:
        raise damaged(file, "is not text", remedy) from None
    except json.JSONDecodeError as error:
        raise damaged(file, f"is not JSON ({error})", remedy) from None
    except ValueError as error:
        raise damaged(file, str(error), remedy) from None


def record_or_warn(file: epath.Path, consequence: str) -> dict[str, Any] | None:
    """Return the table in a file; None, with a warning, if the file is damaged."""
    try:
        return read_record(file, consequence)
    except DataError as error:
        log.warning("%s", error)
        return None


def damaged(file: epath.Path, damage: str, remedy: str) -> DataError:
    """Return the error that names a damaged file, the damage and the remedy."""
    return DataError(f"{file}: {damage}. {remedy}")


def json_compatible(value: Any) -> Any:
    """Convert a value for strict JSON, with secrets masked in texts.

    Scalars of NumPy and JAX become Python scalars. NaN and the infinities become None.
    """
    if isinstance(value, Mapping):
        return {key: json_compatible(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [json_compatible(member) for member in value]
    if isinstance(value, str):
        return mask_output(value)
    value = value.item() if hasattr(value, "item") else value
    is_not_finite = isinstance(value, float) and not math.isfinite(value)
    return None if is_not_finite else value
