"""Read the config of a run that has parts which this process may lack."""

from collections.abc import Collection, Mapping
from dataclasses import field, fields
from typing import Any, Literal, get_type_hints

from train.own_parts import CHOICES, names_in, with_keys, with_sections


def with_recorded_parts(schema: type, values: Mapping[str, Any]) -> type:
    """Return the dataclass of a run's config, of which this process may lack parts.

    `values` are those of the run's config.yaml. A part that this process lacks can be
    read and shown, but not used.
    """
    sections = {
        key.name: _recorded_section(key.type, values[key.name], CHOICES[key.name])
        for key in fields(schema)
        if key.name in CHOICES and isinstance(values.get(key.name), Mapping)
    }
    return with_sections(schema, sections)


def _recorded_section(
    base: Any, table: Mapping[str, Any], keys: Collection[str]
) -> Any:
    """Return a section that accepts the names and the keys of parts in a table."""
    hints = get_type_hints(base)
    changed = list[Any]()
    for key in keys:
        if key not in table:
            continue
        if key == "loss":  # a key that only added losses bring
            changed.append((key, str, "cross_entropy"))
        elif isinstance(table[key], str) and table[key] not in names_in(hints[key]):
            names = hints[key] | Literal[table[key]]
            changed.append((key, names, getattr(base, key)))
    if isinstance(table.get("parts"), Mapping):
        changed.append(("parts", dict[str, Any], field(default_factory=dict)))
    pattern = table.get("mixer_pattern") if "mixer" in keys else None
    if isinstance(pattern, list) and not {*pattern} <= names_in(hints["mixer"]):
        changed.append(("mixer_pattern", tuple[str, ...] | None, None))
    return with_keys(base, changed) if changed else base
