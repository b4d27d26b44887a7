"""Write YAML that means the same to every YAML parser.

Text that a parser may read as a number, a date or a boolean is quoted.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# YAML 1.1 and YAML 1.2 give these words different types.
_AMBIGUOUS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "inf", "nan"}


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each string that is not a plain word."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _AMBIGUOUS
    # A block scalar keeps lines of shell readable.
    is_block = text.endswith("\n") and text.isascii() and text[:-1].strip() == text[:-1]
    style = None if is_plain else "|" if is_block else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return a document as YAML."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 1000}
    return yaml.dump(dict(document), Dumper=_Dumper, **options)


def merge_values(document: Any, changes: Any) -> Any:
    """Return a document with a user's changes merged in; the changes win.

    Mappings are merged recursively, and null removes a key. Lists whose items all have
    a name, such as containers, are merged by name; other lists are replaced.
    """
    if isinstance(document, Mapping) and isinstance(changes, Mapping):
        result = {**document}
        for key, value in changes.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merge_values(result.get(key), value)
        return result
    if _have_names(document) and _have_names(changes):
        by_name = {item["name"]: item for item in document}
        for item in changes:
            by_name[item["name"]] = merge_values(by_name.get(item["name"]), item)
        return list(by_name.values())
    if isinstance(changes, Mapping):  # drops nulls: there is no key to remove
        return merge_values({}, changes)
    return changes


def _have_names(items: Any) -> bool:
    mappings = isinstance(items, list) and all(isinstance(i, Mapping) for i in items)
    return mappings and bool(items) and all("name" in item for item in items)
