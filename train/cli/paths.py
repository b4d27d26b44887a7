"""Rules for texts that a config gives: they are UTF-8, and paths can be used.

The keys of all commands that name files or folders follow the same rules, whether the
command reads there or writes.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.errors import Mistake
from train.identity import leaves

# Names of keys, or of tables, whose texts are paths.
_PATH_NAMES = {
    *("path", "paths", "dir", "cache_dir", "work_dir", "output", "input", "from"),
    *("init_from", "tokenizer", "task_path", "compilation_cache", "prompts", "runs"),
}
_STORES = ("s3", "gs")  # those of data.storage, which takes long to import
# The name of a bucket, or of an access point of Amazon's.
_BUCKET = re.compile(r"([A-Za-z0-9][\w.-]{0,254}|arn:aws[\w:/.-]+)(/|$)", re.ASCII)
_MAX_NAME_BYTES = 255  # the limit of file systems
_MAX_OWN_NAME_BYTES = 200  # for names to which this program adds endings
_MAX_PATH_BYTES = 3000  # below the limit of 4,096, because files lie below


def text_mistakes(
    values: Mapping[str, Any],
) -> Iterator[tuple[tuple[str, ...], Mistake]]:
    """Yield the path of names and a mistake for each text that cannot be used."""
    for names, value in leaves(values):
        key = ".".join(map(str, names))
        texts = value if isinstance(value, list | tuple) else [value]
        for text in texts:
            if isinstance(text, str) and (rule := _broken_rule(names, key, text)):
                yield names, Mistake(key, as_shown(text), rule)
                break


def as_shown(text: str) -> str:
    """Return a text with escapes in place of what a terminal cannot show."""
    shown = text.encode(errors="backslashreplace").decode()
    if any(_is_control(c) for c in shown):
        shown = repr(shown)
    return shown if len(shown) <= 120 else f"{shown[:120]}... ({len(text):,} letters)"


def _broken_rule(names: tuple[str, ...], key: str, text: str) -> str:
    """Return the rule that a text breaks, or an empty string."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8. Rename the file or folder, or change the text"
    if key == "run.name":
        return _name_rule(text)
    return _path_rule(text) if _PATH_NAMES.intersection(names) else ""


def _path_rule(text: str) -> str:
    if not text:
        return "is empty, as of a variable that is not set; write null, or leave it out"
    if any(map(_is_control, text)):
        return "must not hold line breaks or control characters; rename the path"
    if "://" in text:
        return _bucket_rule(text)
    if any(len(name.encode()) > _MAX_NAME_BYTES for name in _parts(text)):
        return f"must have names of at most {_MAX_NAME_BYTES} bytes, as file systems do"
    if len(text.encode()) > _MAX_PATH_BYTES:
        return f"must have at most {_MAX_PATH_BYTES:,} bytes; name a shorter path"
    try:
        Path(text).expanduser()
    except RuntimeError:
        user = text.split("/")[0]
        return f"begins with {user}, but there is no such user; write ./{user}"
    return ""


def _bucket_rule(text: str) -> str:
    """Return the rule that URLs of object stores break, or an empty string."""
    for location in text.split(","):
        scheme, _, rest = location.partition("://")
        if scheme in _STORES and not _BUCKET.match(rest):
            rule = f"must have the name of a bucket after {scheme}://, as in "
            rule += f"{scheme}://bucket/folder. Keys and passwords do not belong in a "
            return rule + "path: the environment or the store's own tools hold them"
    return ""


def _name_rule(text: str) -> str:
    """Return the rule that a run's name breaks, or an empty string."""
    if any(map(_is_control, text)):
        return "must not hold line breaks or control characters"
    if "\\" in text:
        return "must not hold a backslash; use / for a run in a subfolder of runs/"
    for part in text.split("/") if text else ():
        if part in ("", ".", ".."):
            rule = (
                "must be the name of a folder below runs/, without empty parts, . and "
            )
            return f"{rule}..; run.dir=... names a folder anywhere"
        if part != part.strip():
            return "must not begin or end with a space"
        if len(part.encode()) > _MAX_OWN_NAME_BYTES:
            return f"must have at most {_MAX_OWN_NAME_BYTES} bytes"
    return "" if len(text.encode()) <= _MAX_PATH_BYTES else "is too long for a path"


def _parts(text: str) -> list[str]:
    """Return the names in a path; data.path may list several paths."""
    return text.replace(",", "/").split("/")


def _is_control(letter: str) -> bool:
    return ord(letter) < 32 or ord(letter) == 127
