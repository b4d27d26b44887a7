"""docs/reference/config.md lists every key. GOLDEN=1 pytest FILE renews it."""

import inspect
import os
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from operator import attrgetter
from typing import Any

import pytest
from annotated_types import Le, Lt

from launch.config import KINDS, LaunchConfig
from tests.fleet import REPOSITORY
from tests.train.cli.commands import COMMANDS
from train.cli.compose import compose
from train.cli.hints import (
    bare_type,
    bounds_in_words,
    keys_of,
    meaning_of,
    type_in_words,
    type_of,
)
from train.config import Config

PAGE = REPOSITORY / "docs" / "reference" / "config.md"
INTRODUCTION = """\
# Every key

This page is generated from the dataclasses. "Default" is the value of the dataclass;
"train" is the value that `python -m train` has without any override, where its presets
in `configs/` set another one. `python -m train ... --cfg job` shows every value of a
command line, and what is wrong with it. `null` means that nothing is given. Commands
on a run (`train.evaluate` and the like) also take `run.*`, some of them `runtime.*`.
`train.branch` takes `from=<run>@<step>` and the keys of `train`.

For programs and editors, each command prints a JSON Schema of all its keys with
`--cfg schema`: types, bounds, choices, meanings, and the defaults of the dataclasses.
It refuses unknown keys. Rules between keys are not in it: `--cfg job` checks these too.
For `python -m launch`, choose the kind of cluster (`cluster=slurm --cfg schema`).

Unless its bounds say otherwise, a whole number is at most 2147483647."""


def page() -> str:
    shared = {field.name for field in fields(Config)}
    composed = compose([])
    parts = [INTRODUCTION, "## python -m train", *tables(Config, composed=composed)]
    for command, schema in COMMANDS.items():
        other_fields = (
            shared if issubclass(schema, Config) else {"run", "runtime", "distributed"}
        )
        parts += [f"## python -m {command}", *tables(schema, leave_out=other_fields)]
    other_fields = {*shared, "cluster"}
    parts += ["## python -m launch", *tables(LaunchConfig, leave_out=other_fields)]
    for kind, schema in KINDS.items():
        parts += tables(schema, "cluster.", f"cluster={kind}")
    return "\n\n".join(parts) + "\n"


def tables(
    schema: type,
    prefix: str = "",
    title: str = "",
    leave_out: Collection[str] = (),
    composed: Config | None = None,
) -> list[str]:
    """Return parts of a page in Markdown, with one table of keys for each section.

    Args:
        schema: The dataclass.
        prefix: The prefix of its keys.
        title: The title of its own table.
        leave_out: The fields that another table lists.
        composed: The config of a command without overrides, which adds a column.
    """
    hints = typing.get_type_hints(schema, include_extras=True)
    table_fields = [field for field in fields(schema) if field.name not in leave_out]
    rows = list(rows_of(schema, table_fields, prefix, composed))
    parts = [f"### {title}"] if title else []
    parts.append(inspect.cleandoc(schema.__doc__ or ""))
    if rows:
        columns = ["key", "type", "default", "bounds", "meaning"]
        if composed is not None:
            columns.insert(3, "train")
        head = "| " + " | ".join(columns) + " |"
        parts.append("\n".join([head, "| --- " * len(columns) + "|", *rows]))
    for field in table_fields:
        kind = bare_type(hints[field.name])
        key = f"{prefix}{field.name}"
        entry = (typing.get_args(kind) or (None,))[-1]
        if is_dataclass(kind):
            parts += tables(typing.cast(type, kind), f"{key}.", key, (), composed)
        elif is_dataclass(entry):
            entry_key = (
                f"{key}.<name>" if typing.get_origin(kind) is dict else f"{key}[i]"
            )
            parts += tables(typing.cast(type, entry), f"{entry_key}.", entry_key)
    return parts


def rows_of(
    schema: type,
    table_fields: Sequence[Field],
    prefix: str,
    composed: Config | None = None,
) -> Iterator[str]:
    hints = typing.get_type_hints(schema, include_extras=True)
    for field in table_fields:
        hint = hints[field.name]
        if not is_dataclass(bare_type(hint)):
            bounds = bounds_in_words(hint)
            key = f"{prefix}{field.name}"
            default = default_of(field)
            cells = [f"`{key}`", type_in_words(hint), in_words(default)]
            if composed is not None:
                value = attrgetter(key)(composed)
                cells.append("" if value == default else in_words(value))
            text = meaning_of(schema, field.name).replace("<", "&lt;")
            cells += [bounds, text]
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def default_of(field: Field) -> Any:
    if field.default is MISSING:
        return field.default_factory()  # type: ignore
    return field.default


def in_words(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return '`""`' if value == "" else f"`{value}`"


def test_the_page_lists_every_key():
    if os.environ.get("GOLDEN"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "write it anew: GOLDEN=1 pytest this file"


SCHEMAS = [Config, *COMMANDS.values(), LaunchConfig, *KINDS.values()]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_each_key_has_a_sentence_with_its_meaning(schema: type):
    keys = [key for key in keys_of(schema) if not is_section(type_of(schema, key)[0])]
    assert [key for key in keys if not meaning_of(schema, key).endswith(".")] == []


def is_section(hint: Any) -> bool:
    return is_dataclass(bare_type(hint))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_whole_number_has_an_upper_bound(schema: type):
    unbounded = [key for key, hint in hints_of(schema) if takes_any_number(hint)]
    assert unbounded == []


def hints_of(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the type hint of every setting, also in tables and lists."""
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        yield prefix + name, hint
        kinds = (bare_type(hint), *typing.get_args(bare_type(hint)))
        for section in filter(is_dataclass, kinds):
            yield from hints_of(typing.cast(type, section), f"{prefix}{name}.")


def takes_any_number(hint: Any) -> bool:
    """Return whether a hint, or a part of it, takes a whole number of any size."""
    limits = getattr(hint, "__metadata__", ())
    if any(isinstance(limit, Le | Lt) for limit in limits):
        return False
    return hint is int or any(map(takes_any_number, typing.get_args(hint)))
