"""Dataclasses to OmegaConf and back.

The dataclasses own types and defaults; OmegaConf merges and converts. Its types, and
Hydra's, appear in this file, `train/cli/flags.py`, `train/cli/compose.py` and
`train/cli/command.py` only: the rest of the code sees frozen dataclasses.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from etils import epath
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.config import Config
from train.errors import ConfigError, Mistake

Schema = TypeVar("Schema")


def schema_node(schema: type) -> DictConfig:
    """Give the schema with its defaults, ready for values to be merged into."""
    node = OmegaConf.structured(schema)
    _writable(node)
    return node


def _writable(node: DictConfig) -> None:
    # OmegaConf takes a frozen dataclass for read-only, at every level.
    OmegaConf.set_readonly(node, None)
    for name in node:
        if OmegaConf.is_dict(node[name]):
            _writable(node[name])


def load(cfg: DictConfig, schema: type[Schema] = Config) -> Schema:
    """Convert a composed config to nested frozen dataclasses, interpolations resolved.

    Raises:
        ConfigError: if a key is unknown or a value cannot be converted.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema_node(schema), cfg))  # type: ignore
    except OmegaConfBaseException as e:
        key = str(getattr(e, "full_key", None) or "config")
        raise ConfigError([Mistake(key, "", str(e).splitlines()[0])]) from e


def to_yaml(config: object) -> str:
    """Write a config out as YAML, every key with its value."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


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
    tree = schema_node(schema)
    for key, value in changes.items():
        entry, _, name = key.rpartition(".")
        if value is None and in_table(tree, entry):
            section = OmegaConf.select(cfg, entry)
            section.pop(name, None)
            if not section:
                table, _, name = entry.rpartition(".")
                OmegaConf.select(cfg, table).pop(name)
        else:
            OmegaConf.update(cfg, key, value, force_add=True)
    found = []
    for key, value in OmegaConf.to_container(cfg).items():  # type: ignore
        found += value_mistakes(tree, str(key), value, open_tables=True)
    if found:
        raise ConfigError([m._replace(rule=f"{m.rule} (in {path})") for m in found])
    return load(cfg, schema)


def value_mistakes(
    tree: DictConfig, key: str, value: object, open_tables: bool
) -> list[Mistake]:
    """Check one key, or a mapping of keys below it, against a typed tree.

    Args:
        tree: what the key is set in; correct values are.
        key: full dotted key.
        value: what Python, Hydra's parser or YAML made of it.
        open_tables: whether a table (`mesh.params`) takes new entries.
    """
    parent, _, name = key.rpartition(".")
    for section in (key, parent):
        table, _, new = section.rpartition(".")
        if not has_key(tree, section) and _holds_sections(tree, table):
            rule = f"is in no section of the table; write {table}={{{new}: {{...}}}}"
            return [Mistake(key, value, rule)]
    takes = in_table(tree, key) or _holds_anything(tree, parent)
    if not has_key(tree, key) and not (open_tables and takes):
        hint = "; to add it to the table write "
        hint = f"{hint}+{key}=..." if in_table(tree, key) else ""
        return [Mistake(key, value, unknown_key(tree, key) + hint)]
    section = _section(tree, key)
    if isinstance(value, dict) and _is_open(tree, key):
        if found := _text_mistakes(tree, key, value):
            return found
    elif isinstance(value, dict) and section is not None:
        if _holds_sections(tree, key):
            new = {sub: {} for sub in value if sub not in section.keys()}  # noqa: SIM118
            OmegaConf.update(tree, key, new, merge=True, force_add=True)
            _writable(section)
        return [
            mistake
            for sub, item in value.items()
            for mistake in value_mistakes(tree, f"{key}.{sub}", item, open_tables)
        ]
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=open_tables)
    except (OmegaConfBaseException, ValueError, TypeError) as e:
        kind = OmegaConf.get_type(_section(tree, parent))
        hint = typing.get_type_hints(kind).get(name) if is_dataclass(kind) else None
        rule = f"must be {describe(hint)}" if hint else str(e).splitlines()[0]
        return [Mistake(key, value, rule)]
    return []


def _holds_sections(tree: DictConfig, key: str) -> bool:
    """Say whether a key is a table of dataclasses, such as `data.sources`."""
    parent, _, name = key.rpartition(".")
    kind = OmegaConf.get_type(_section(tree, parent))
    hint = typing.get_type_hints(kind).get(name) if is_dataclass(kind) else None
    return typing.get_origin(hint) is dict and is_dataclass(typing.get_args(hint)[1])


def _is_open(tree: DictConfig, key: str) -> bool:
    """Say whether a key is an open table, whose entries may have dots in them."""
    parent, _, name = key.rpartition(".")
    kind: Any = OmegaConf.get_type(_section(tree, parent))
    known = fields(kind) if is_dataclass(kind) else ()
    return any(field.name == name and field.metadata.get("open") for field in known)


def _text_mistakes(tree: DictConfig, key: str, table: dict) -> list[Mistake]:
    """List what is no text in a table of texts: OmegaConf lets lists and tables in."""
    if _kind_of_entries(tree, key) is not str:
        return []
    return [
        Mistake(f"{key}.{entry}", value, "must be a string")
        for entry, value in table.items()
        if isinstance(value, dict | list)
    ]


def _holds_anything(tree: DictConfig, key: str) -> bool:
    """Say whether a key is, or is to be, below an open table of anything."""
    while key and not _is_open(tree, key):
        key = key.rpartition(".")[0]
    return bool(key) and _kind_of_entries(tree, key) is Any


def _kind_of_entries(tree: DictConfig, table: str) -> Any:
    parent, _, name = table.rpartition(".")
    hints = typing.get_type_hints(OmegaConf.get_type(_section(tree, parent)))
    return typing.get_args(hints[name])[1]


def has_key(tree: DictConfig, key: str) -> bool:
    """Say whether a full dotted key is in the tree, whatever its value."""
    parent, _, name = key.rpartition(".")
    section = _section(tree, parent)
    # `in` without keys() resolves interpolations, which Hydra's own may not yet be.
    return section is not None and name in section.keys()  # noqa: SIM118


def in_table(tree: DictConfig, key: str) -> bool:
    """Say whether a key stands, or would stand, in a table such as `mesh.params`."""
    section = _section(tree, key.rpartition(".")[0])
    return section is not None and OmegaConf.get_type(section) is dict


def unknown_key(tree: DictConfig, key: str) -> str:
    """Say that there is no such key, and which was perhaps meant or are there."""
    rule, parent = "there is no such key", key.rpartition(".")[0]
    if meant := did_you_mean(key, dotted_keys(tree)):
        return rule + meant
    while parent and _section(tree, parent) is None:
        parent = parent.rpartition(".")[0]
    if not parent or parent.partition(".")[0] == "hydra":
        return f"{rule}; --cfg job shows all there are"
    return f"{rule}; {parent} has {', '.join(map(str, _section(tree, parent) or ()))}"


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


def dotted_keys(tree: DictConfig, prefix: str = "") -> list[str]:
    """List every key of a tree, sections too, but for those of Hydra itself."""
    keys = []
    for name in tree:
        key = f"{prefix}{name}"
        if key != "hydra":
            keys.append(key)
            if (section := _section(tree, str(name))) is not None:
                keys += dotted_keys(section, f"{key}.")
    return keys


def describe(hint: Any) -> str:
    """Say in words what a type hint takes: `a whole number, or null`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        rest = [describe(a) for a in arguments if a is not type(None)]
        return " or ".join(rest) + (", or null" if type(None) in arguments else "")
    if origin is list:
        return "a list such as [a,b]" + (", of whole numbers" * (arguments == (int,)))
    if origin is dict:
        return "a table {key: value}"
    if is_dataclass(hint):
        return "set key by key: it is a section"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(hint.__members__)
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(hint, "a string" if hint is str else str(hint))


def _tail(key: str) -> str:
    return key.rpartition(".")[2]


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _section(tree: DictConfig, key: str) -> DictConfig | None:
    """Give the mapping under a key, or None if there is none."""
    node: Any = tree
    for name in key.split(".") if key else ():
        if not isinstance(node, DictConfig) or name not in node.keys():  # noqa: SIM118
            return None
        if OmegaConf.is_interpolation(node, name) or OmegaConf.is_missing(node, name):
            return None
        node = node[name]
    return node if isinstance(node, DictConfig) else None
