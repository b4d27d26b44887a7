"""Read the config of a run that has parts which this process may lack."""

from collections.abc import Iterable, Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, Literal, get_args, get_type_hints

# The keys of each section that name a part.
_CHOICES = {
    "model": ("mixer", "mlp"),
    "data": ("format",),
    "optimizer": ("name",),
    "schedule": ("name",),
    "train": ("loss",),
}


def with_recorded_parts(schema: type, values: Mapping[str, Any]) -> type:
    """Return the dataclass of a run's config, of which this process may lack parts.

    `values` are those of the run's config.yaml. A part that this process lacks can be
    read and shown, but not used.
    """
    changed = list[Any]()
    for key in fields(schema):
        table = values.get(key.name)
        if key.name in _CHOICES and isinstance(table, Mapping):
            section = _recorded_section(key.type, table, _CHOICES[key.name])
            if section is not key.type:
                changed.append((key.name, section, field(default_factory=section)))
    if not changed:
        return schema
    return make_dataclass(schema.__name__, changed, bases=(schema,), frozen=True)


def _recorded_section(base: Any, table: Mapping[str, Any], keys: Iterable[str]) -> Any:
    hints = get_type_hints(base)
    defaults = {key.name: key.default for key in fields(base)}
    changed = [
        (key, hints[key] | Literal[table[key]], defaults[key])
        for key in keys
        if key in hints and table.get(key) not in (None, *_names(hints[key]))
        if isinstance(table[key], str)
    ]
    if "loss" in keys and "loss" in table:
        changed.append(("loss", str, "cross_entropy"))
    if isinstance(table.get("parts"), Mapping):
        changed.append(("parts", dict[str, Any], field(default_factory=dict)))
    if not changed and not {*_listed(table)} - {*_names(hints.get("mixer"))}:
        return base
    if "mixer" in keys:
        changed.append(("mixer_pattern", tuple[str, ...] | None, None))
    return make_dataclass(base.__name__, changed, bases=(base,), frozen=True)


def _listed(table: Mapping[str, Any]) -> list[Any]:
    pattern = table.get("mixer_pattern")
    return pattern if isinstance(pattern, list) else []


def _names(hint: Any) -> list[str]:
    """Return the names of an enum, alone or in a union."""
    members = (hint, *get_args(hint))
    return [name for member in members for name in getattr(member, "__members__", ())]
