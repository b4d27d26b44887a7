"""Sections of the config with parts that users have added.

The class of such a section has the attribute `own`: the added parts, by the key that
chooses one of them, and by name. The keys of a part lie below `parts.<name>`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

# The keys that choose parts, by the section of a config that may have added parts.
CHOICES = {
    "model": ("mixer", "mlp"),
    "data": ("format",),
    "optimizer": ("name",),
    "schedule": ("name",),
    "train": ("loss",),
}


@dataclass(frozen=True)
class Parts:
    """The keys of added parts, a section for each."""


class Chosen(NamedTuple):
    """The part that a section chooses, and the values of its keys, if it has any."""

    part: Any
    values: Any


def chosen_part(section: Any, key: str) -> Chosen | None:
    """Return the added part that a section's key names; None for a built-in one."""
    part = getattr(type(section), "own", {}).get(key, {}).get(getattr(section, key, ""))
    if part is None:
        return None
    values = getattr(section.parts, part.name) if part.section else None
    return Chosen(part, values)


def added_metrics(train: object) -> tuple[Any, ...]:
    """Return the records of the metrics that were added to the section `train`."""
    return getattr(type(train), "metrics", ())


def names_in(hint: Any) -> set[str]:
    """Return the names that a type accepts: of an enum, a Literal, or a union."""
    members = (hint, *get_args(hint))
    names = {name for member in members for name in getattr(member, "__members__", ())}
    return names | {member for member in members if isinstance(member, str)}


def with_sections(base: type, sections: Mapping[str, type], **attributes: Any) -> type:
    """Return a dataclass like `base`, with other types of some sections.

    `attributes` are those of the class. If nothing changes, `base` is returned.
    """
    types = {key.name: key.type for key in fields(base)}
    changed = [
        (name, section, field(default_factory=section))
        for name, section in sections.items()
        if section is not types.get(name)
    ]
    if not changed and not attributes:
        return base
    return with_keys(base, changed, **attributes)


def with_keys(base: type, keys: Iterable[Any], **attributes: Any) -> type:
    """Return a dataclass like `base`, with further or other keys.

    `keys` are those of `make_dataclass`, and `attributes` are those of the class.
    """
    # Without a docstring, `dataclass` would write one with the type of every key.
    namespace = {"__doc__": base.__doc__, **attributes}
    return make_dataclass(
        base.__name__, keys, bases=(base,), frozen=True, namespace=namespace
    )


def with_own(
    base: type,
    key: str,
    parts: Iterable[Any],
    others: Iterable[Any] = (),
    **attributes: Any,
) -> type:
    """Return a section in which a key may also name added parts.

    Args:
        base: the dataclass of the section.
        key: the key that chooses a part. Without parts, it stays as it is.
        parts: the records of the added parts.
        others: records of parts that other keys choose. Their keys lie below `parts`
            too.
        attributes: further attributes of the class.
    """
    by_name = {part.name: part for part in parts}
    changed = list[Any]()
    if by_name:
        hint = get_type_hints(base, include_extras=True)[key]
        names = Literal[tuple(by_name)]
        accepted = Annotated[hint.__origin__ | names, *hint.__metadata__]
        changed.append((key, accepted, getattr(base, key)))
    sections = {
        part.name: part.section
        for part in (*others, *by_name.values())
        if getattr(part, "section", None)
    }
    if sections:
        parts_type = with_sections(Parts, sections)
        changed.append(("parts", parts_type, field(default_factory=parts_type)))
    if not changed and not attributes:
        return base
    return with_keys(base, changed, own={key: by_name}, **attributes)


def sections_like(schema: type, config: Any) -> type:
    """Return a dataclass of all keys, with the added parts of a config's sections."""
    sections = {name: type(getattr(config, name)) for name in CHOICES}
    return with_sections(schema, sections)
