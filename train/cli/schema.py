"""Plain values to frozen dataclasses, and back to YAML.

The dataclasses own types, defaults and bounds (`Annotated[int, Ge(1)]`); pydantic holds
values against them and names everything that is wrong at once. It is imported when the
first value is checked: help needs none of it.
"""

import copy
import functools
import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

from etils import epath
from omegaconf import DictConfig, OmegaConf

from train.cli.hints import (
    bounds_rule,
    inside,
    kind_of,
    type_of,
    type_rule,
    unknown_key,
)
from train.cli.reference import meaning
from train.config import Config
from train.errors import ConfigError, Mistake

Schema = TypeVar("Schema")

# Keys that had another name: it still works, also in the config.yaml of old runs.
OLD_NAMES = {"data.skip_steps": "data.skip_batches"}
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def convert(
    values: Mapping[str, Any], schema: type[Schema]
) -> tuple[Schema, list[Mistake]]:
    """Convert nested plain values, as YAML has them, to a dataclass.

    Args:
        values: may lack keys: they have their defaults.
        schema: the dataclass.

    Returns:
        The config, a wrong value replaced by its default, and all that is wrong.
    """
    from pydantic import ValidationError

    values, adapter = copy.deepcopy(dict(values)), _adapter(schema)
    for old, new in OLD_NAMES.items():
        _rename(values, old, new)
    mistakes: dict[str, Mistake] = {}
    for key, value in leaves(values):  # pydantic takes true for 1
        hint = type_of(schema, key)[0]
        if isinstance(value, bool) and kind_of(hint) in (int, float):
            rule = explained(type_rule(hint), schema, key)
            mistakes[key] = Mistake(key, value, rule)
    config: Any = None
    try:
        config = adapter.validate_python((values,))[0]
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            key, mistake = _mistake(schema, entry)
            mistakes.setdefault(key, mistake)
    if mistakes:
        for key in mistakes:
            _remove(values, key.partition("[")[0])
        config = adapter.validate_python((values,))[0]
    return config, list(mistakes.values())


@functools.cache
def _adapter(schema: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # A dataclass of its own takes no settings from outside; inside a tuple it does.
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    inside: Any = types.GenericAlias(tuple, (schema,))
    return TypeAdapter(inside, config=config)


def _mistake(schema: type, entry: Mapping[str, Any]) -> tuple[str, Mistake]:
    """Translate one of pydantic's errors; return the key that it stands at, too."""
    hint, key = schema, ""
    for name in entry["loc"][1:]:
        if not is_dataclass(kind_of(hint)) and inside(hint, name) is None:
            break  # the rest tells the members of a union apart
        hint = inside(hint, name)
        place = f"[{name}]" if isinstance(name, int) else f".{name}"
        key = (key + place).removeprefix(".")
    value, full = entry["input"], key
    if hint is None:
        while isinstance(value, dict) and len(value) == 1:
            ((name, value),) = value.items()
            full = f"{full}.{name}"
        return key, Mistake(full, value, unknown_key(schema, full))
    bounded = entry["type"] in _BOUNDS and bounds_rule(hint)
    rule = explained(bounded or type_rule(hint), schema, key)
    return key, Mistake(key, value, rule)


def explained(rule: str, schema: type, key: str) -> str:
    """Add to a rule what the key means."""
    text = meaning(schema, key.replace("[", ".").replace("]", ""))
    text = text or meaning(schema, key.partition("[")[0])
    return f"{rule}\n({text})" if text else rule


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """List every value that is no mapping, under its full dotted key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _rename(values: dict[str, Any], old: str, new: str) -> None:
    (above, _, name), new_name = old.rpartition("."), new.rpartition(".")[2]
    section = values.get(above)
    if isinstance(section, dict) and name in section:
        given = section.pop(name)
        section[new_name] = section.get(new_name) or given


def _remove(values: dict[str, Any], key: str) -> None:
    """Take out the deepest part of a key that there is: names may have dots in them."""
    section: Any = values
    while key:
        name = next(
            (name for name in section if f"{key}.".startswith(f"{name}.")), None
        )
        if name is None:
            return
        key = key[len(str(name)) + 1 :]
        if not key or not isinstance(section[name], dict):
            del section[name]
            return
        section = section[name]


def load(values: Mapping[str, Any], schema: type[Schema] = Config) -> Schema:
    """Convert plain values to a dataclass.

    Raises:
        ConfigError: with everything that is wrong.
    """
    config, mistakes = convert(values, schema)
    if mistakes:
        raise ConfigError(mistakes)
    return config


def to_yaml(config: Any) -> str:
    """Return a config as YAML, every key with its value."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def read_yaml(
    path: epath.PathLike,
    schema: type[Schema] = Config,
    changes: Mapping[str, Any] = types.MappingProxyType({}),
) -> Schema:
    """Read a config.yaml back. A key that it lacks has its default.

    Args:
        path: of the file.
        schema: the dataclass that it is of.
        changes: other values of some keys; null takes an entry out of a table.

    Raises:
        ConfigError: if the file is missing or no YAML; or, each named, for every
            unknown key and every value of a wrong type.
    """
    try:
        cfg = OmegaConf.create(epath.Path(path).read_text())
    except FileNotFoundError as e:
        rule = "does not exist; check run.dir or run.name"
        raise ConfigError([Mistake(str(path), "", rule)]) from e
    except Exception as e:
        raise ConfigError([Mistake(str(path), "", f"cannot be read: {e}")]) from e
    if not isinstance(cfg, DictConfig):
        raise ConfigError([Mistake(str(path), "", "must hold key: value lines")])
    for key, value in changes.items():
        hint, in_table = type_of(schema, key.rpartition(".")[0])
        if value is None and in_table and is_dataclass(hint):
            _pop(cfg, key)
        else:
            OmegaConf.update(cfg, key, value, force_add=True)
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    config, mistakes = convert(values, schema)
    if mistakes:
        raise ConfigError([m._replace(rule=f"{m.rule} (in {path})") for m in mistakes])
    return config


def _pop(cfg: DictConfig, key: str) -> None:
    """Take a key out, and its section if that is empty then."""
    entry, _, name = key.rpartition(".")
    section = OmegaConf.select(cfg, entry)
    section.pop(name, None)
    if not section:
        table, _, name = entry.rpartition(".")
        OmegaConf.select(cfg, table).pop(name)
