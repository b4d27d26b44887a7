"""Convert plain values to frozen dataclasses, and frozen dataclasses to YAML.

The dataclasses declare types, defaults and bounds (`Annotated[int, Ge(1)]`). pydantic
checks values against the dataclasses and reports all errors at once. Help does not need
pydantic, so pydantic is imported only when values are checked.
"""

import copy
import functools
import types
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

from etils import epath
from omegaconf import OmegaConf

from data.errors import Mistake
from train.cli.hints import (
    Translate,
    bare_type,
    bounds_in_words,
    must_be,
    no_translation,
    type_in_words,
    type_inside,
    type_of,
    unknown_key,
)
from train.cli.paths import text_mistakes
from train.cli.plain_yaml import check_complete, parse_yaml
from train.config import Config
from train.errors import ConfigError
from train.identity import leaves
from train.masking import mask_values
from train.recorded_parts import with_recorded_parts

Schema = TypeVar("Schema")

_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def convert(
    values: Mapping[str, Any],
    schema: type[Schema],
    translate: Translate = no_translation,
) -> tuple[Schema, list[Mistake]]:
    """Convert nested plain values to a dataclass; missing keys get their defaults.

    `translate` is that of `unknown_key`.

    Returns:
        The config, with defaults in place of wrong values, and the list of mistakes.
    """
    from pydantic import ValidationError

    values = copy.deepcopy(dict(values))
    validate = _validator(schema)
    mistakes: dict[tuple[Any, ...], Mistake] = {}
    for path, value in leaves(values):  # pydantic would convert true to 1
        key = ".".join(map(str, path))
        hint = type_of(schema, key)[0]
        if isinstance(value, bool) and bare_type(hint) in (int, float):
            rule = must_be(type_in_words(hint), schema, key)
            mistakes[path] = Mistake(key, value, rule)
    try:
        validate((values,))
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            path, mistake = _translate_error(schema, entry, translate)
            mistakes.setdefault(path, mistake)
    for path, mistake in text_mistakes(values):
        mistakes.setdefault(path, mistake)
    for path in mistakes:
        _remove(values, path)
    return validate((values,))[0], list(mistakes.values())


@functools.cache
def _validator(schema: type) -> Any:
    """Return a function from `(values,)` to `(config,)` that rejects unknown keys.

    pydantic 2.14. `TypeAdapter` accepts `extra="forbid"` for a tuple that holds a plain
    dataclass, but not for the dataclass alone.
    """
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    in_tuple: Any = types.GenericAlias(tuple, (schema,))
    return TypeAdapter(in_tuple, config=config).validate_python


def _translate_error(
    schema: type, entry: Mapping[str, Any], translate: Translate
) -> tuple[tuple[Any, ...], Mistake]:
    """Return the path of the value in a pydantic error, and the mistake to report."""
    hint = schema
    key = ""
    path = list[Any]()
    for name in entry["loc"][1:]:
        if not is_dataclass(bare_type(hint)) and type_inside(hint, name) is None:
            break  # the remaining names are members of a union, not keys
        hint = type_inside(hint, name)
        path.append(name)
        key += f"[{name}]" if isinstance(name, int) else f".{name}"
        key = key.removeprefix(".")
    value = entry["input"]
    if hint is not None:
        words = bounds_in_words(hint, value) if entry["type"] in _BOUNDS else ""
        rule = must_be(words or type_in_words(hint), schema, key)
        return tuple(path), Mistake(key, value, rule)
    while isinstance(value, dict) and len(value) == 1:
        ((name, value),) = value.items()
        key = f"{key}.{name}"
    return tuple(path), unknown_key(schema, key, value, translate)


def _remove(values: dict[str, Any], path: tuple[Any, ...]) -> None:
    """Remove the value at a path; if the value is in a list, remove the list."""
    *sections, name = path
    for section in sections:
        if not isinstance(values.get(section), dict):
            name = section
            break
        values = values[section]
    values.pop(name, None)


def config_yaml(config: Any) -> str:
    """Return a config as YAML, with every key and with secrets masked."""
    return OmegaConf.to_yaml(OmegaConf.create(mask_values(asdict(config))))


def _check_version(path: epath.PathLike, values: Mapping[str, Any]) -> None:
    """Check that the config of a run has data.document_start, which each run records.

    Raises:
        ConfigError: it lacks the key, whose default would change the run's data.
    """
    data = values.get("data") or {}
    if isinstance(data, Mapping) and "document_start" not in data:
        rule = "lacks data.document_start, so another version of this program wrote "
        rule += "it, and this version does not read it; start another run.name"
        raise ConfigError([Mistake(str(path), "", rule)])


def read_yaml(
    path: epath.PathLike,
    schema: type[Config] | None = None,
    changes: Mapping[str, Any] = types.MappingProxyType({}),
    text: str | None = None,
) -> Config:
    """Read a config.yaml as a dataclass; missing keys get their defaults.

    Interpolations such as `${oc.env:HOME}` are not resolved, because another user may
    have written the file.

    Args:
        path: the path of the file.
        schema: the dataclass to read it as. None accepts parts that this process lacks
            (train/recorded_parts.py).
        changes: values to set, by key; None removes an entry of a table.
        text: the content to read instead of the file; errors still name `path`.

    Raises:
        ConfigError: if the file is missing or damaged, if a key is unknown, or if a
            value has a wrong type. The error lists all such keys. Also if the config of
            a run lacks data.document_start.
    """
    try:
        plain = _read_file(epath.Path(path)) if text is None else _read_table(text)
        cfg = OmegaConf.create(plain)
        schema = schema or with_recorded_parts(Config, plain)
        _apply_changes(cfg, schema, changes)
        values: Any = OmegaConf.to_container(cfg)
    except Exception as error:
        rule = f"cannot be read: {error}; restore it from a copy of the run"
        if isinstance(error, FileNotFoundError):
            rule = "does not exist; check run.dir or run.name"
        raise ConfigError([Mistake(str(path), "", rule)]) from None
    _check_version(path, values)
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
    check_complete(text)
    return table


def _read_table(text: str) -> dict[str, Any]:
    """Return the keys and values in YAML, with numbers parsed as OmegaConf does.

    Raises:
        ValueError: the text is damaged.
    """
    table = parse_yaml(text)  # refuses alias bombs, which OmegaConf would expand
    if not isinstance(table, dict):
        raise ValueError("must hold key: value lines")
    plain: Any = OmegaConf.to_container(OmegaConf.create(text))
    return plain


def _apply_changes(cfg: Any, schema: type, changes: Mapping[str, Any]) -> None:
    """Set keys of a config in place; None removes an entry of a table."""
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        hint, in_table = type_of(schema, table)
        if value is None and in_table and is_dataclass(hint):
            OmegaConf.select(cfg, table).pop(name, None)
            if not OmegaConf.select(cfg, table):
                parent, _, entry = table.rpartition(".")
                OmegaConf.select(cfg, parent).pop(entry)
        else:
            OmegaConf.update(cfg, key, value, force_add=True)
