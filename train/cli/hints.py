"""Describe the type, bounds and meaning of a key in words, and find similar keys."""

import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from math import inf
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

from data.config import INT32_MAX
from data.errors import Mistake

# A sentence about a key of another trainer, and the keys that it names.
Translation = tuple[str, tuple[str, ...]]
Translate = Callable[[str, Sequence[str]], Translation]

_CLOSE = 0.8  # Spellings that are closer are taken for the same name.
_VERY_CLOSE = 0.92
_SEPARATORS = str.maketrans("", "", "._-")


def type_of(schema: type, key: str) -> tuple[Any, bool]:
    """Return a dotted key's type hint (or None), and whether the key is in a table.

    A table's own key also counts as in a table, because a table accepts new entries.
    """
    hint = schema
    in_table = False
    for name in key.split(".") if key else ():
        hint = type_inside(hint, name)
        in_table |= typing.get_origin(bare_type(hint)) is dict
    return hint, in_table


def type_inside(hint: Any, name: object) -> Any:
    """Return the hint of a section's field, or of the entries of a table or list."""
    bare = bare_type(hint)
    if is_dataclass(bare):
        return _field_hints(bare).get(str(name))
    is_table_or_list = typing.get_origin(bare) in (dict, list)
    return typing.get_args(bare)[-1] if is_table_or_list else None


@functools.cache
def _field_hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def bare_type(hint: Any) -> Any:
    """Return the first type of a hint other than None, without its annotations."""
    member = next((m for m in _members(hint) if m is not types.NoneType), None)
    annotated = typing.get_origin(member) is typing.Annotated
    return typing.get_args(member)[0] if annotated else member


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union with their annotations, or the hint itself."""
    is_annotated = typing.get_origin(hint) is typing.Annotated
    inner = typing.get_args(hint)[0] if is_annotated else hint
    is_union = typing.get_origin(inner) in (types.UnionType, typing.Union)
    return typing.get_args(inner) if is_union else (hint,)


def keys_of(schema: type, prefix: str = "") -> list[str]:
    """Return every key of a dataclass, including its sections."""
    keys = []
    for name, hint in typing.get_type_hints(schema).items():
        keys.append(f"{prefix}{name}")
        if is_dataclass(hint):
            keys += keys_of(typing.cast(type, hint), f"{prefix}{name}.")
    return keys


def no_translation(key: str, keys: Sequence[str]) -> Translation:
    """Return no sentence: the default of `unknown_key`."""
    return "", ()


def unknown_key(
    schema: type, key: str, value: object = "", translate: Translate = no_translation
) -> Mistake:
    """Return the mistake for an unknown key, with the keys that may be meant.

    `translate` says which keys have the place of another trainer's key.
    """
    keys = keys_of(schema)
    rule = "there is no such key"
    parent = key.rpartition(".")[0]
    sentence, translated = translate(key, keys)
    if sentence:
        return Mistake(key, value, f"{rule}; {sentence}", translated)
    section = type_of(schema, parent)[0]
    siblings = fields(section) if is_dataclass(section) and parent else ()
    known_keys = sorted({*keys, *(f"{parent}.{field.name}" for field in siblings)})
    similar = similar_names(key, known_keys)
    if similar:
        return Mistake(key, value, rule + did_you_mean(similar), tuple(similar))
    while not is_dataclass(section):
        parent = parent.rpartition(".")[0]
        section = type_of(schema, parent)[0]
    if not parent:
        return Mistake(key, value, f"{rule}; --cfg job shows all keys")
    names = ", ".join(field.name for field in fields(section))
    return Mistake(key, value, f"{rule}; {parent} has {names}")


def similar_names(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that `word` probably means, the likeliest first.

    These are names with the same last part, or else with the closest spelling, if it is
    close. A last part of one word, such as `mode`, is too common to be compared across
    sections, and one of several words is not taken for a word. No hint is better than a
    wrong one.
    """
    names = list(names)
    section = word.rpartition(".")[0]
    last_part = _last_part(word)
    if not last_part:
        return []

    def is_comparable(name: str) -> bool:
        other = name.rpartition(".")[0]
        has_words = "_" in last_part
        return has_words or not section or _closeness(section, other) > _CLOSE

    exact_matches = [
        n
        for n in names
        if last_part in (_last_part(n), _initials(_last_part(n))) and is_comparable(n)
    ]
    if exact_matches:
        return difflib.get_close_matches(word, exact_matches, n=3, cutoff=0)
    closeness = dict[str, float]()
    for name in names:
        closeness[name] = _closeness(word, name)
        if is_comparable(name):
            of_last_parts = _closeness(last_part, _last_part(name))
            closeness[name] = max(closeness[name], of_last_parts)
    best = max(closeness.values(), default=0.0)
    closest = [name for name in names if closeness[name] == best > _CLOSE]
    return sorted(closest, key=len)[:3]


def _closeness(a: str, b: str) -> float:
    """Return how close two spellings are, from 0 to 1.

    Names of one word and of several words are close only without their separators.
    """
    same_form = ("_" in _last_part(a)) == ("_" in _last_part(b))
    a, b = (name.lower().translate(_SEPARATORS) for name in (a, b))
    if sorted(a) == sorted(b):  # two letters have changed places
        return 1.0
    ratio = difflib.SequenceMatcher(None, a, b).ratio()
    return ratio if same_form or ratio > _VERY_CLOSE else 0.0


def did_you_mean(names: Sequence[str]) -> str:
    """Return `; did you mean ...?`, or an empty string without names."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _initials(name: str) -> str:
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def must_be(words: str, schema: type, key: str) -> str:
    """Return the rule that a value must be `words`, followed by the key's meaning."""
    # A key may have indices into lists, such as `profile.steps[0]`.
    meaning = meaning_of(schema, key.replace("[", ".").replace("]", ""))
    meaning = meaning or meaning_of(schema, key.partition("[")[0])
    return f"must be {words}\n({meaning})" if meaning else f"must be {words}"


def meaning_of(schema: type, key: str) -> str:
    """Return the `Doc` of a key, or an empty string for a section or unknown key."""
    notes = getattr(type_of(schema, key)[0], "__metadata__", ())
    return next((note.documentation for note in notes if isinstance(note, Doc)), "")


def type_in_words(hint: Any) -> str:
    """Describe the values of a type hint, such as `a whole number, or null`."""
    members = _members(hint)
    bare = bare_type(hint)
    origin = typing.get_origin(bare)
    arguments = typing.get_args(bare)
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if len(members) > 1:
        literals = [m for m in members if _is_literal(m)]
        alternatives = [m for m in members if m not in (types.NoneType, *literals)]
        words = [type_in_words(member) for member in alternatives]
        if isinstance(bare, type) and issubclass(bare, Enum):  # with further names
            names = [str(name) for m in literals for name in typing.get_args(m)]
            words[0] = ", ".join([words[0], *names])
        words += ["null"] * (types.NoneType in members)
        return ", or ".join(words)
    if origin is tuple:
        names = list[str]()
        has_numbers = False
        for member in _members(arguments[0]):
            has_numbers |= bare_type(member) is int
            names += typing.get_args(member) if _is_literal(member) else ()
        return "a list of " + ", ".join(names) + ", or whole numbers" * has_numbers
    if origin is list:
        holds_numbers = bare_type(arguments[0]) is int
        return "a list such as [a,b]" + ", of whole numbers" * holds_numbers
    if origin is dict:
        return "a table {key: value}"
    if is_dataclass(bare):
        return "set key by key: it is a section"
    if isinstance(bare, type) and issubclass(bare, Enum):
        return "one of " + ", ".join(bare.__members__)
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    words |= {str: "a string", Any: "a string, or a list"}
    return words[bare]


def _is_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Literal


def bounds_in_words(hint: Any, value: object = None) -> str:
    """Describe the bounds of a hint, such as `at least 1, or null`; "" without bounds.

    The limit of int32, which nearly every whole number has, is only mentioned if
    `value` exceeds it.
    """
    members = _members(hint)
    notes = [n for member in members for n in getattr(member, "__metadata__", ())]
    low = next((note for note in notes if isinstance(note, Ge | Gt)), None)
    high = next((note for note in notes if isinstance(note, Le | Lt)), None)
    if high == Le(INT32_MAX) and not (isinstance(value, int) and value > INT32_MAX):
        high = None
    interval = _interval(low, high)
    # A union may accept single values in addition to an interval.
    others = [str(x) for m in members if _is_literal(m) for x in typing.get_args(m)]
    others += ["null"] * (types.NoneType in members)
    return ", or ".join([interval, *others]) if interval else ""


def _interval(low: Ge | Gt | None, high: Le | Lt | None) -> str:
    lower: Any = low.ge if isinstance(low, Ge) else low and low.gt
    upper: Any = high.le if isinstance(high, Le) else high and high.lt
    if lower is None:
        return ""
    if upper not in (None, inf):
        opening = "[("[isinstance(low, Gt)]
        closing = "])"[isinstance(high, Lt)]
        return f"in {opening}{lower}, {upper}{closing}"
    suffix = " and finite" if upper == inf else ""
    if isinstance(low, Ge):
        return f"at least {lower}{suffix}"
    return f"positive{suffix}" if lower == 0 else f"above {lower}{suffix}"
