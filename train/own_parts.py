"""Sections of the config with parts that users have added.

A section of the config knows the parts that were added to it: its class has them in the
attribute `own`, by key and name. The keys of a part lie below `parts.<name>`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, fields, make_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    get_type_hints,
)

# The sections of a config that may have added parts.
SECTIONS = ("model", "data", "optimizer", "schedule", "train")


class Part(Protocol):
    """What all records of parts have. Most also have a `section`: their keys."""

    @property
    def name(self) -> str:
        """The value of the key that chooses the part."""
        ...


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


def check_added_parts(model: Any, train: Any) -> None:
    """Check the added parts that two sections choose, before anything is compiled.

    Raises:
        ConfigError: a part lacks a method, fails, or returns another shape.
    """
    if (check := getattr(type(train), "check", None)) is not None:
        check(model, train)


def with_own(
    base: type,
    own: Mapping[str, Iterable[Part]],
    keys: Iterable[Part] = (),
    **attributes: Any,
) -> type:
    """Return a section whose keys may also name added parts.

    Args:
        base: the dataclass of the section.
        own: the parts by the key that chooses one of them. Without parts, the key stays
            as it is.
        keys: further parts, whose keys lie below `parts` too.
        attributes: further attributes of the class.
    """
    by_key = {key: {part.name: part for part in parts} for key, parts in own.items()}
    changed = list[Any]()
    for key, parts in by_key.items():
        if parts:
            hint = get_type_hints(base, include_extras=True)[key]
            names = Literal[tuple(parts)]
            default = next(f.default for f in fields(base) if f.name == key)
            accepted = Annotated[hint.__origin__ | names, *hint.__metadata__]
            changed.append((key, accepted, default))
    all_parts = [*keys, *(part for parts in by_key.values() for part in parts.values())]
    sections: dict[str, Any] = {
        part.name: section
        for part in all_parts
        if (section := getattr(part, "section", None)) is not None
    }
    if sections:
        parts_type = make_dataclass(
            "Parts",
            [(n, s, field(default_factory=s)) for n, s in sections.items()],
            frozen=True,
            namespace={"__doc__": "The keys of added parts, a section for each."},
        )
        changed.append(("parts", parts_type, field(default_factory=parts_type)))
    if not changed and not attributes:
        return base
    namespace = {"__doc__": base.__doc__, "own": by_key, **attributes}
    return make_dataclass(
        base.__name__, changed, bases=(base,), frozen=True, namespace=namespace
    )


def sections_like(schema: type, config: Any) -> type:
    """Return a dataclass of all keys, with the added parts of a config's sections."""
    changed = list[Any]()
    for key in fields(schema):
        section = type(getattr(config, key.name))
        if key.name in SECTIONS and section is not key.type:
            changed.append((key.name, section, field(default_factory=section)))
    return make_dataclass(schema.__name__, changed, bases=(schema,), frozen=True)
