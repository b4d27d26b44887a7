"""Plain values to frozen dataclasses, and back to YAML.

The dataclasses own types, defaults and bounds (`Annotated[int, Ge(1)]`); pydantic holds
values against them and names everything that is wrong at once. It is imported when the
first value is checked: help needs none of it.
"""

import copy
import functools
import types
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

from etils import epath
from omegaconf import OmegaConf

from train.cli.hints import inside, kind_of, type_of, unknown_key, value_rule
from train.cli.plain_yaml import check_whole, parse_yaml
from train.config import Config
from train.errors import ConfigError, Mistake
from train.identity import leaves
from train.masking import masked

Schema = TypeVar("Schema")

# Keys that had another name: it still works, also in the config.yaml of old runs.
OLD_NAMES = {
    "data.skip_steps": "data.skip_batches",
    "tracker.name": "tracker.wandb.enabled",
    "tracker.project": "tracker.wandb.project",
    "tracker.mode": "tracker.wandb.mode",
}
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def convert(
    values: Mapping[str, Any], schema: type[Schema]
) -> tuple[Schema, list[Mistake]]:
    """Convert nested plain values, as YAML has them, to a dataclass.

    Keys that they lack have their defaults.

    Returns:
        The config, a wrong value replaced by its default, and all that is wrong.
    """
    from pydantic import ValidationError

    values, validate = copy.deepcopy(dict(values)), _adapter(schema).validate_python
    _rename(values)
    mistakes: dict[tuple[Any, ...], Mistake] = {}
    for path, value in leaves(values):  # pydantic takes true for 1
        key = ".".join(map(str, path))
        hint = type_of(schema, key)[0]
        if isinstance(value, bool) and kind_of(hint) in (int, float):
            mistakes[path] = Mistake(key, value, value_rule(schema, key, hint))
    try:
        validate((values,))
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            path, mistake = _mistake(schema, entry)
            mistakes.setdefault(path, mistake)
    for path in mistakes:
        _remove(values, path)
    return validate((values,))[0], list(mistakes.values())


def renamed(key: str, value: Any) -> tuple[str, Any]:
    """Return a key of any version as it is called today, and its value likewise."""
    if key == "tracker.name":  # it was none or wandb
        value = value == "wandb"
    return OLD_NAMES.get(key, key), value


def _rename(values: dict[str, Any]) -> None:
    """Give keys of older versions the names of today."""
    for old in OLD_NAMES:
        section, name = old.split(".")
        section_values = values.get(section)
        if isinstance(section_values, dict) and name in section_values:
            new, value = renamed(old, section_values.pop(name))
            *tables, today = new.split(".")[1:]
            for table in tables:
                section_values = section_values.setdefault(table, {})
            section_values[today] = value


@functools.cache
def _adapter(schema: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # A dataclass of its own takes no settings from outside; inside a tuple it does.
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    inside: Any = types.GenericAlias(tuple, (schema,))
    return TypeAdapter(inside, config=config)


def _mistake(schema: type, entry: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mistake]:
    """Translate one of pydantic's errors; return the path of the value, too."""
    hint, key, path = schema, "", list[Any]()
    for name in entry["loc"][1:]:
        if not is_dataclass(kind_of(hint)) and inside(hint, name) is None:
            break  # the rest tells the members of a union apart
        hint = inside(hint, name)
        path.append(name)
        step = f"[{name}]" if isinstance(name, int) else f".{name}"
        key = (key + step).removeprefix(".")
    value = entry["input"]
    if hint is not None:
        bounds = entry["type"] in _BOUNDS
        rule = value_rule(schema, key, hint, bounds, value)
        return tuple(path), Mistake(key, value, rule)
    while isinstance(value, dict) and len(value) == 1:
        ((name, value),) = value.items()
        key = f"{key}.{name}"
    return tuple(path), Mistake(key, value, unknown_key(schema, key))


def _remove(values: dict[str, Any], path: tuple[Any, ...]) -> None:
    """Take out the deepest part of a path that there is: of a list all goes."""
    *sections, name = path
    for section in sections:
        if not isinstance(values.get(section), dict):
            name = section
            break
        values = values[section]
    values.pop(name, None)


def to_yaml(config: Any) -> str:
    """Return a config as YAML, every key with its value, secrets masked."""
    return OmegaConf.to_yaml(OmegaConf.create(masked(asdict(config))))


def read_yaml(
    path: epath.PathLike,
    schema: type[Schema] = Config,
    changes: Mapping[str, Any] = types.MappingProxyType({}),
    text: str | None = None,
) -> Schema:
    """Read a config.yaml back. A key that it lacks has its default.

    The file may be someone else's, so an interpolation such as `${oc.env:HOME}` in it
    stays text: it is not resolved with the environment of this user.

    Args:
        path: of the file.
        schema: the dataclass to read it as.
        changes: other values of some keys; null takes an entry out of a table.
        text: is read instead of the file; errors still name `path`.

    Raises:
        ConfigError: if the file is missing or damaged; or, each named, for every
            unknown key and every value of a wrong type.
    """
    try:
        plain = _read_file(epath.Path(path)) if text is None else _read_table(text)
        _rename(plain)
        cfg = OmegaConf.create(plain)
        _change(cfg, schema, changes)
        values: Any = OmegaConf.to_container(cfg)
    except FileNotFoundError:
        rule = "does not exist; check run.dir or run.name"
        raise ConfigError([Mistake(str(path), "", rule)]) from None
    except Exception as error:
        rule = f"cannot be read: {error}; put it back from a copy of the run"
        raise ConfigError([Mistake(str(path), "", rule)]) from None
    config, mistakes = convert(values, schema)
    if mistakes:
        raise ConfigError([m._replace(rule=f"{m.rule} (in {path})") for m in mistakes])
    return config


def _read_file(path: epath.Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    if path.exists() and not path.is_file():
        raise ValueError("is not a file")
    text = path.read_text()
    table = _read_table(text)
    check_whole(text)
    return table


def _read_table(text: str) -> dict[str, Any]:
    """Return the keys and values in YAML, with numbers as OmegaConf reads them.

    Raises:
        ValueError: the text is damaged.
    """
    table = parse_yaml(text)  # so that OmegaConf expands no aliases without end
    if not isinstance(table, dict):
        raise ValueError("must hold key: value lines")
    plain: Any = OmegaConf.to_container(OmegaConf.create(text))
    return plain


def _change(cfg: Any, schema: type, changes: Mapping[str, Any]) -> None:
    """Set some keys of a config; null takes an entry out of a table."""
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        hint, in_table = type_of(schema, table)
        if value is None and in_table and is_dataclass(hint):
            OmegaConf.select(cfg, table).pop(name, None)
            if not OmegaConf.select(cfg, table):
                above, _, entry = table.rpartition(".")
                OmegaConf.select(cfg, above).pop(entry)
        else:
            OmegaConf.update(cfg, key, value, force_add=True)
