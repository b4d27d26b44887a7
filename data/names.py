"""Check names that come from files, such as those in a manifest or an index.

Such a file may come from another person. So each name in it must be that of a file
below its folder, which is checked before anything is opened, copied, emptied or
deleted. data/storage.py also checks what lies at the path.
"""

from collections.abc import Iterable
from typing import Any


def checked_name(name: Any) -> str:
    """Return a name if it is that of a file below its folder.

    Raises:
        ValueError: it is not text, is absolute, has a part `.` or `..`, or has a
            character that does not belong in a name.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    is_plain = not any(part in ("", ".", "..") or "\\" in part for part in parts)
    if not (is_plain and name.isprintable() and "://" not in name):
        shown = str(name)[:100]
        raise ValueError(f"{shown!r} is not the name of a file below its folder")
    return name


def numbers_in(names: Iterable[str]) -> list[int]:
    """Return the whole numbers among names, ascending, if spelled as Python does."""
    digits = (name for name in names if name.isascii() and name.isdigit())
    return sorted(int(name) for name in digits if name == str(int(name)))
