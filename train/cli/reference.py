"""What each key means: the comment beside its field, for mistakes and docs/config.md.

docs/config.md is made of these tables by tests/train/cli/test_reference.py, which also
holds it current.
"""

import ast
import functools
import inspect
import textwrap
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from train.cli.hints import bounds_rule, describe, kind_of, type_of


def meaning(schema: type, key: str) -> str:
    """Return the comment of a key's field; empty if there is none."""
    parent, _, name = key.rpartition(".")
    section: Any = kind_of(type_of(schema, parent)[0])
    if not is_dataclass(section):
        return ""
    bases = inspect.getmro(typing.cast(type, section))[:-1]
    return next(
        (_comments(base)[name] for base in bases if name in _comments(base)), ""
    )


@functools.cache
def _comments(section: type) -> dict[str, str]:
    """Return the comments above and beside each field that a class itself declares."""
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except (OSError, TypeError):  # made by make_dataclass
        return {}
    lines, comments = source.splitlines(), {}
    for node in ast.parse(source).body[0].body:  # type: ignore
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno - 1
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            texts = [line.strip(" #") for line in lines[above : node.lineno - 1]]
            beside = lines[node.end_lineno - 1][node.end_col_offset :]  # type: ignore
            texts.append(beside.strip(" #"))
            text = " ".join(filter(None, texts)).removesuffix(".")
            comments[node.target.id] = text[:1].upper() + text[1:]
    return comments


def tables(
    schema: type, prefix: str = "", title: str = "", leave_out: Collection[str] = ()
) -> list[str]:
    """Return the parts of a page in Markdown: for each section its keys as a table.

    Args:
        schema: the dataclass.
        prefix: of its keys.
        title: of its own table.
        leave_out: fields that stand elsewhere.
    """
    hints = typing.get_type_hints(schema, include_extras=True)
    own = [field for field in fields(schema) if field.name not in leave_out]
    rows = list(_rows(schema, own, prefix))
    parts = [f"### {title}"] if title else []
    parts.append(inspect.cleandoc(schema.__doc__ or ""))
    if rows:
        head = "| key | type | default | bounds | meaning |"
        parts.append("\n".join([head, "| --- | --- | --- | --- | --- |", *rows]))
    for field in own:
        kind, key = kind_of(hints[field.name]), f"{prefix}{field.name}"
        entry = (typing.get_args(kind) or (None,))[-1]
        if is_dataclass(kind):
            parts += tables(typing.cast(type, kind), f"{key}.", key)
        elif is_dataclass(entry):
            each = f"{key}.<name>" if typing.get_origin(kind) is dict else f"{key}[i]"
            parts += tables(typing.cast(type, entry), f"{each}.", each)
    return parts


def _rows(schema: type, own: Sequence[Field], prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(schema, include_extras=True)
    for field in own:
        hint = hints[field.name]
        if not is_dataclass(kind_of(hint)):
            bounds = bounds_rule(hint).removeprefix("must ").removeprefix("be ")
            cells = [f"`{prefix}{field.name}`", describe(hint), _default(field)]
            text = meaning(schema, field.name).replace("<", "&lt;")
            cells += [bounds, text]
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(field: Field) -> str:
    value: Any = field.default
    if value is MISSING:
        value = field.default_factory()  # type: ignore
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return '`""`' if value == "" else f"`{value}`"
