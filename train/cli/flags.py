"""Hydra's flags (`--multirun`, `--cfg job`, ...) and the mistakes in them."""

from argparse import ArgumentError, Namespace
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from train.cli.quoting import hydra_text
from train.cli.schema import did_you_mean
from train.errors import ConfigError, Mistake


def parse_flags(argv: Sequence[str]) -> Namespace:
    """Parse Hydra's flags; `.overrides` holds the rest.

    Raises:
        ConfigError: for flags that Hydra does not have, or that are not for us.
    """
    parser = get_args_parser()

    def error(message: str) -> NoReturn:
        raise ArgumentError(None, message)

    parser.error = error
    for action in parser._actions:
        action.choices = None  # `flag_mistakes` lists these with all else
    try:
        flags, unknown = parser.parse_known_args(flags_first(argv))
    except ArgumentError as e:
        raise ConfigError([Mistake("command line", "", str(e))]) from e
    flags.unknown = [text for text in unknown if text.startswith("-")]
    flags.overrides += [text for text in unknown if not text.startswith("-")]
    return flags


def flags_first(argv: Sequence[str]) -> list[str]:
    """Move overrides behind flags: argparse takes them in one place only."""
    return sorted(argv, key=lambda a: a[0:1] == "~" or ("=" in a and a[0:1] != "-"))


def quote_text(argv: Sequence[str], schema: type) -> list[str]:
    """Quote what Hydra's grammar would misread as a value of a text key.

    So `prompt='def f('` and `data.path=a,b` say what they seem to. Values that are
    quoted already, null, and the sweeps of `--multirun` stay. A table of sections, and
    one that is marked as open (`train/config.py`), takes new entries: Hydra wants that
    said with ++.
    """
    sweeps = is_sweep(parse_flags(argv))
    parser = OverridesParser.create()

    def quoted(argument: str) -> str:
        key, equals, value = argument.partition("=")
        hint, opens = _hint(schema, key)
        if equals and get_origin(hint) is dict and is_dataclass(get_args(hint)[1]):
            opens = True
        argument, key = (
            f"++{text}" if equals and opens else text for text in (argument, key)
        )
        if not equals or hint not in (str, str | None):
            return argument
        try:
            parsed = parser.parse_override(argument)
            sweep, plain = parsed.is_sweep_override(), value == value.strip()
            if sweeps if sweep else plain and _one_value(parsed.value()):
                return argument
        except HydraException:
            pass
        return hydra_text(key, value)

    return [quoted(argument) for argument in argv]


def _one_value(value: object) -> bool:
    return not isinstance(value, list | dict)


def _hint(schema: type, key: str) -> tuple[Any, bool]:
    """Give the type of a dotted key of a dataclass, or None; is it in an open table?"""
    hint: Any = schema
    opens = False
    for name in key.split("."):
        if is_dataclass(hint):
            opens |= any(
                f.name == name and f.metadata.get("open") for f in fields(hint)
            )
            hint = get_type_hints(hint).get(name)
        else:
            hint = get_args(hint)[1] if get_origin(hint) is dict and opens else None
    return hint, opens


def is_sweep(flags: Namespace) -> bool:
    """Say whether Hydra will run several jobs."""
    return flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides


def flag_mistakes(flags: Namespace) -> list[Mistake]:
    """List flags that do not exist, that exclude each other or that we lack."""
    actions = get_args_parser()._actions
    known = [option for action in actions for option in action.option_strings]
    found = []
    for action in actions:
        value, choices = getattr(flags, action.dest, None), list(action.choices or ())
        if choices and value not in (None, *choices):
            rule = f"must be one of {', '.join(choices)}"
            found.append(Mistake(f"--{action.dest}", value, rule))
    for flag in flags.unknown:
        rule = "there is no such flag" + did_you_mean(flag, known)
        found.append(Mistake(flag, "", f"{rule}; --hydra-help lists them"))
    modes = ("run", "cfg", "multirun", "info", "shell_completion")
    asked = [mode for mode in modes if getattr(flags, mode)]
    if len(asked) > 1:
        names = " and ".join(f"--{mode.replace('_', '-')}" for mode in asked)
        found.append(Mistake(names, "", "exclude each other; give one"))
    if flags.resolve and not (flags.cfg or flags.help):
        found.append(Mistake("--resolve", "", "goes with --cfg only"))
    if flags.config_path or flags.experimental_rerun:
        flag = "--config-path" if flags.config_path else "--experimental-rerun"
        rule = "is not supported; presets of your own go into --config-dir <folder>"
        found.append(Mistake(flag, "", rule))
    if flags.config_dir and not Path(flags.config_dir).is_dir():
        found.append(Mistake("--config-dir", flags.config_dir, "is not a folder"))
    return found
