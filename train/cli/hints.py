"""What the dataclasses say of a key, in words for people: its type, bounds, meaning.

A key means what the comment above or beside its field says.
"""

import ast
import difflib
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from math import inf
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from data.config import INT32_MAX
from train.cli.other_trainers import name_here


def type_of(schema: type, key: str) -> tuple[Any, bool]:
    """Return the type hint of a dotted key, None if there is none; is it in a table?

    A table itself counts: it takes new entries.
    """
    hint, in_table = schema, False
    for name in key.split(".") if key else ():
        hint = inside(hint, name)
        in_table |= typing.get_origin(hint) is dict
    return hint, in_table


def inside(hint: Any, name: object) -> Any:
    """Return the type hint of a field, or of an entry of a table or list; or None."""
    kind = kind_of(hint)
    if is_dataclass(kind):
        return _field_hints(kind).get(str(name))
    table = typing.get_origin(kind) in (dict, list)
    return typing.get_args(kind)[-1] if table else None


@functools.cache
def _field_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def unknown_key(schema: type, key: str) -> str:
    """Return the rule for a key that there is not: which may be meant, or are there."""
    rule, parent = "there is no such key", key.rpartition(".")[0]
    if here := name_here(key, keys_of(schema)):
        return f"{rule}; {here}"
    section = type_of(schema, parent)[0]
    beside = fields(section) if is_dataclass(section) and parent else ()
    listed = {*keys_of(schema), *(f"{parent}.{field.name}" for field in beside)}
    if meant := did_you_mean(key, sorted(listed)):
        return rule + meant
    if section is None and (meant := did_you_mean(parent, sorted(listed))):
        return rule + meant
    while not is_dataclass(section):
        parent = parent.rpartition(".")[0]
        section = type_of(schema, parent)[0]
    if not parent:
        return f"{rule}; --cfg job shows all there are"
    return f"{rule}; {parent} has {', '.join(field.name for field in fields(section))}"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Suggest names: of the same last part, or its initials, or spelt alike."""
    names, last = list(names), _tail(word)
    same = [name for name in names if last in (_tail(name), _initials(_tail(name)))]
    meant = difflib.get_close_matches(word, same, n=3, cutoff=0)
    if not meant:
        close = difflib.get_close_matches(word, names, n=5)
        alike = [difflib.SequenceMatcher(None, last, _tail(name)) for name in close]
        meant = [n for n, a in zip(close, alike, strict=True) if a.ratio() > 0.6][:1]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _tail(key: str) -> str:
    return key.rpartition(".")[2]


def _initials(name: str) -> str:
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


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
    kind = next(m for m in _members(hint) if m is not types.NoneType)
    annotated = typing.get_origin(kind) is typing.Annotated
    return typing.get_args(kind)[0] if annotated else kind


def value_rule(
    schema: type, key: str, hint: Any, bounds: bool = False, value: object = None
) -> str:
    """Return what a value must be, `must be a number, or null`, and what the key means.

    The key has the places in lists, `profile.steps[0]`. `bounds`: tell these, and not
    the type, for this `value`.
    """
    rule = bounds_rule(hint, value) if bounds else ""
    rule = rule or f"must be {describe(hint)}"
    text = meaning(schema, key.replace("[", ".").replace("]", ""))
    text = text or meaning(schema, key.partition("[")[0])
    return f"{rule}\n({text})" if text else rule


def describe(hint: Any) -> str:
    """Return in words what a type hint takes: `a whole number, or null`."""
    members, kind = _members(hint), kind_of(hint)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if len(members) > 1:
        own = [m for m in members if m is not types.NoneType]
        words = [describe(m) for m in own if typing.get_origin(m) is not typing.Literal]
        return ", or ".join([*words, *["null"] * (len(own) < len(members))])
    if origin is tuple:
        members = _members(arguments[0])
        names = [
            n for m in members if kind_of(m) is not int for n in typing.get_args(m)
        ]
        numbers = any(kind_of(member) is int for member in members)
        return "a list of " + ", ".join(names) + ", or whole numbers" * numbers
    if origin is list:
        numbers = kind_of(arguments[0]) is int
        return "a list such as [a,b]" + ", of whole numbers" * numbers
    if origin is dict:
        return "a table {key: value}"
    if is_dataclass(kind):
        return "set key by key: it is a section"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(kind.__members__)
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, "a string" if kind is str else str(kind))


def bounds_rule(hint: Any, value: object = None) -> str:
    """Return a hint's bounds in words: `must be at least 1, or null`; "" if none.

    The limit of int32, which nearly every whole number has, is left out unless `value`
    is above it.
    """
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
    if high == Le(INT32_MAX) and not (isinstance(value, int) and value > INT32_MAX):
        high = None
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


def meaning(schema: type, key: str) -> str:
    """Return the comment of a key's field; empty if there is none."""
    parent, _, name = key.rpartition(".")
    section: Any = kind_of(type_of(schema, parent)[0])
    if not is_dataclass(section):
        return ""
    bases = inspect.getmro(typing.cast(type, section))[:-1]
    return next(
        (_comments(base)[name] for base in bases if name in _comments(base)), ""
    )


@functools.cache
def _comments(section: type) -> dict[str, str]:
    """Return the comments above and beside each field that a class itself declares."""
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except (OSError, TypeError):  # made by make_dataclass
        return {}
    lines, comments = source.splitlines(), {}
    for node in ast.parse(source).body[0].body:  # type: ignore
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno - 1
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            texts = [line.strip(" #") for line in lines[above : node.lineno - 1]]
            beside = lines[node.end_lineno - 1][node.end_col_offset :]  # type: ignore
            texts.append(beside.strip(" #"))
            text = " ".join(filter(None, texts)).removesuffix(".")
            first = text.split(" ")[0].strip(",:;")
            if first.isalpha():  # v5e-256 stays as it is typed
                text = text[:1].upper() + text[1:]
            comments[node.target.id] = text
    return comments
