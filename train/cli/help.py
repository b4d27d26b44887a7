"""Write the help of a command: what it does, its keys, its flags and its exit codes.

The first part is `hydra.help.header` of the command's root file in `configs/`. The keys
come from the dataclasses, with the sentences that declare them.
"""

import functools
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf

from data.program import with_shown_commands
from train.cli.hints import bare_type, meaning_of
from train.cli.plain_yaml import parse_yaml
from train.cli.presets import CONFIG_DIR, Presets, search_path
from train.config import Config
from train.errors import as_typed
from train.errors import meaning as code_meaning

_WIDTH = 88
_INDENT = 28  # the column of the sentences
_MAX_DEFAULT = 40  # characters; a longer default is not shown
_TRAINING_CODES = (0, 3, 4, 5, 42, 65, 70, 75, 78, 130, 134)
_DATA_CODES = (0, 65, 78)
# The exit codes of each command, by the name of its root file.
_CODES = {
    "train": _TRAINING_CODES,
    "branch": _TRAINING_CODES,
    "launch": _TRAINING_CODES,
    "plan": (0, 4, 65, 78),
    "prove": (0, 5, 65, 78),
    "coordinates": (0, 5, 65, 78),
    "report": (0, 78),
    "status": (0, 78),
    "profile": (0, 78),
    "prepare": (0, 65, 78, 130),
}
_SWEPT = ("train", "plan", "prove", "coordinates")
_LISTING = ("train", "branch")  # Help of these commands lists the keys of training.


def help_text(
    config_name: str, schema: type, default_choices: Sequence[str], folder: str | None
) -> str:
    """Return the help of a command.

    Args:
        config_name: the root file in `configs/`.
        schema: the dataclass of all keys.
        default_choices: the `group=choice` pairs that are chosen by default.
        folder: a folder with the user's presets, which are listed too.
    """
    root = parse_yaml((CONFIG_DIR / f"{config_name}.yaml").read_text())
    with search_path(schema, folder):
        presets = Presets(config_name, schema, default_choices)
        values = OmegaConf.to_container(presets.compose([])[0])
        groups = {group: ", ".join(presets.options(group)) for group in presets.groups}
    wrapper = textwrap.TextWrapper(
        _WIDTH, initial_indent="  ", subsequent_indent="    "
    )
    lines = [wrapper.fill(f"{name}: {choices}") for name, choices in groups.items()]
    shown = "".join(f"{line}\n" for line in lines)
    header = root["hydra"]["help"]["header"].replace("$APP_CONFIG_GROUPS", shown)
    trains = issubclass(schema, Config)
    left_out = set[str]()
    if trains and config_name not in _LISTING:
        left_out = {field.name for field in fields(Config)}
    parts = [header.rstrip(), "\n".join(_key_lines(schema, values, left_out))]
    if left_out:
        parts.append("python -m train --help lists the keys of training.")
    parts.append(_footer(config_name, bool(groups)))
    return with_shown_commands("\n\n".join(parts))


def _key_lines(schema: type, values: Any, left_out: set[str]) -> Iterator[str]:
    """Yield lines for each key: its default, if that is short, and its meaning."""
    yield "Keys, with their defaults:"
    for key in _keys(schema):
        if key.partition(".")[0] in left_out:
            continue
        text = f"  {key}"
        if "<name>" not in key and "[i]" not in key:
            value = as_typed(
                functools.reduce(lambda t, n: t[n], key.split("."), values)
            )
            text += f"={value}" if len(value) <= _MAX_DEFAULT else ""
        if len(text) > _INDENT - 2:
            yield text
            text = ""
        meaning = meaning_of(schema, key.replace("[i]", ".i"))
        width = _WIDTH - _INDENT
        for line in textwrap.wrap(meaning, width, break_on_hyphens=False):
            yield f"{text:<{_INDENT}}{line}"
            text = ""


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a dataclass that are no sections, in their order."""
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        kind = bare_type(hint)
        key = f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _keys(typing.cast(type, kind), f"{key}.")
            continue
        yield key
        *_, entry = [None, *typing.get_args(kind)]
        if is_dataclass(entry):
            place = ".<name>" if typing.get_origin(kind) is dict else "[i]"
            yield from _keys(typing.cast(type, entry), f"{key}{place}.")


def _footer(config_name: str, has_groups: bool) -> str:
    """Return sentences about the flags that are useful here, and the exit codes."""
    flags = ["--cfg job shows every key with its value."]
    flags.append("--cfg schema prints their types and bounds as a JSON Schema.")
    if config_name in _SWEPT:
        flags.append("--multirun key=a,b runs a sweep.")
    if has_groups:
        flags.append("--config-dir <folder> adds presets of your own.")
    flags.append("--hydra-help lists the other flags.")
    codes = _CODES.get(config_name, _DATA_CODES)
    meanings = ", ".join(f"{code} {code_meaning(code)}" for code in codes)
    texts = (f"Flags: {' '.join(flags)}", f"Exit codes: {meanings}.")
    return "\n\n".join(textwrap.fill(text, _WIDTH) for text in texts)
