"""What the dataclasses' type hints say of a key, in words for people."""

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from math import inf
from typing import Any, cast

from annotated_types import Ge, Gt, Le, Lt

# What other programs take for a key, and what to do here.
_HABITS = {"resume": "the same command continues a run"}


def type_of(schema: type, key: str) -> tuple[Any, bool]:
    """Return the type hint of a dotted key, None if there is none; is it in a table?

    A table itself counts: it takes new entries.
    """
    hint, opens = schema, False
    for name in key.split(".") if key else ():
        hint = inside(hint, name)
        opens |= typing.get_origin(hint) is dict
    return hint, opens


def inside(hint: Any, name: object) -> Any:
    """Return the type hint of a field, or of an entry of a table or list; or None."""
    kind = kind_of(hint)
    if is_dataclass(kind):
        return typing.get_type_hints(kind, include_extras=True).get(str(name))
    table = typing.get_origin(kind) in (dict, list)
    return typing.get_args(kind)[-1] if table else None


def unknown_key(schema: type, key: str) -> str:
    """Return the rule for a key that there is not: which may be meant, or are there."""
    rule, (parent, _, _) = "there is no such key", key.rpartition(".")
    if key in _HABITS:
        return f"{rule}; {_HABITS[key]}"
    section: Any = type_of(schema, parent)[0] if parent else schema
    beside = fields(section) if is_dataclass(section) and parent else ()
    listed = [*keys_of(schema), *(f"{parent}.{field.name}" for field in beside)]
    if meant := did_you_mean(key, dict.fromkeys(listed)):
        return rule + meant
    if parent and section is None and (meant := did_you_mean(parent, listed)):
        return rule + meant
    while parent and not is_dataclass(section):
        parent = parent.rpartition(".")[0]
        section = type_of(schema, parent)[0] if parent else schema
    if not parent:
        return f"{rule}; --cfg job shows all there are"
    names = (field.name for field in fields(cast(type, section)))
    return f"{rule}; {parent} has {', '.join(names)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest known names: of the same last part, so abbreviated, or spelt alike."""
    known, last = list(known), _tail(word)
    same = [key for key in known if _tail(key) == last]
    same += [key for key in known if len(last) > 1 and _initials(_tail(key)) == last]
    meant = difflib.get_close_matches(word, same, n=3, cutoff=0)
    meant = (
        meant
        or [
            key
            for key in difflib.get_close_matches(word, known, n=5)
            if difflib.SequenceMatcher(None, last, _tail(key)).ratio() > 0.6
        ][:1]
    )
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _tail(key: str) -> str:
    return key.rpartition(".")[2]


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def keys_of(schema: type, prefix: str = "") -> list[str]:
    """List every key of a dataclass, sections too."""
    keys = []
    for name, hint in typing.get_type_hints(schema).items():
        keys.append(f"{prefix}{name}")
        if is_dataclass(hint):
            keys += keys_of(typing.cast(type, hint), f"{prefix}{name}.")
    return keys


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def kind_of(hint: Any) -> Any:
    """Return the type of a hint, without null, bounds and single values."""
    kinds = [
        typing.get_args(member)[0]
        if typing.get_origin(member) is typing.Annotated
        else member
        for member in _members(hint)
        if member is not types.NoneType
    ]
    return kinds[0]


def type_rule(hint: Any) -> str:
    """Return the rule for a value of a wrong type: `must be a number, or null`."""
    return f"must be {describe(hint)}"


def describe(hint: Any) -> str:
    """Return in words what a type hint takes: `a whole number, or null`."""
    members, kind = _members(hint), kind_of(hint)
    arguments = typing.get_args(kind)
    if len(members) > 1 and typing.get_origin(kind) is not typing.Literal:
        return describe(members[0]) + ", or null" * (types.NoneType in members)
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, arguments))
    if typing.get_origin(kind) is list:
        return "a list such as [a,b]" + (", of whole numbers" * (arguments == (int,)))
    if typing.get_origin(kind) is dict:
        return "a table {key: value}"
    if is_dataclass(kind):
        return "set key by key: it is a section"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(kind.__members__)
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, "a string" if kind is str else str(kind))


def bounds_rule(hint: Any) -> str:
    """Return a hint's bounds in words: `must be at least 1, or null`; "" if none."""
    low = high = None
    words = []
    for member in _members(hint):
        for bound in getattr(member, "__metadata__", ()):
            low = bound if isinstance(bound, Ge | Gt) else low
            high = bound if isinstance(bound, Le | Lt) else high
        if typing.get_origin(member) is typing.Literal:
            words += map(str, typing.get_args(member))
    if types.NoneType in _members(hint):
        words.append("null")
    if low is None and high is None:
        return ""
    interval = _interval(low, high)
    if words and interval == "not be negative":
        interval = "be at least 0"
    return ", or ".join([f"must {interval}", *words])


def _interval(low: Ge | Gt | None, high: Le | Lt | None) -> str:
    least = low.ge if isinstance(low, Ge) else low and low.gt
    most = high.le if isinstance(high, Le) else high and high.lt
    if least is not None and most not in (None, inf):
        opening, closing = "[("[isinstance(low, Gt)], "])"[isinstance(high, Lt)]
        return f"lie in {opening}{least}, {most}{closing}"
    finite = " and finite" if most == inf else ""
    if isinstance(low, Ge):
        return f"be at least {least}{finite}" if least or finite else "not be negative"
    return f"be positive{finite}" if least == 0 else f"be above {least}{finite}"
