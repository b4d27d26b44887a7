"""Documents for clusters, as YAML that means the same to every reader of YAML.

Words that one of them takes for a number, a date or a truth value stand in quotes.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# Readers of YAML 1.1 and 1.2 differ about these.
_TAKEN = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "inf", "nan"}


class _Dumper(yaml.SafeDumper):
    """Quotes each text that is not a plain word."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _TAKEN
    # A block shows lines of shell as they are.
    script = text.endswith("\n") and text.isascii() and text[:-1].strip() == text[:-1]
    style = None if plain else "|" if script else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(document: Mapping[str, Any]) -> str:
    """Write a document."""
    style: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 1000}
    return yaml.dump(dict(document), Dumper=_Dumper, **style)


def merge_values(document: Any, more: Any) -> Any:
    """Merge what a person adds into a document; theirs wins.

    Keys are merged all the way down, null takes a key away. Lists whose items all have
    a name are merged by it, as containers and variables are; other lists are replaced.
    """
    if isinstance(document, Mapping) and isinstance(more, Mapping):
        result = {**document}
        for key, value in more.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merge_values(result.get(key), value)
        return result
    if _named(document) and _named(more):
        by_name = {item["name"]: item for item in document}
        for item in more:
            by_name[item["name"]] = merge_values(by_name.get(item["name"]), item)
        return list(by_name.values())
    if isinstance(more, Mapping):  # without the keys that it would have taken away
        return merge_values({}, more)
    return more


def _named(items: Any) -> bool:
    mappings = isinstance(items, list) and all(isinstance(i, Mapping) for i in items)
    return mappings and bool(items) and all("name" in item for item in items)
