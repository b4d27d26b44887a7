"""Hydra's flags (`--multirun`, `--cfg job`, ...) and the mistakes in them."""

from argparse import ArgumentError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from train.cli.hints import did_you_mean, keys_of
from train.config import Config
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
        name, equals, value = flag.lstrip("-").partition("=")
        rule = "there is no such flag" + did_you_mean(flag, known)
        if (
            key := did_you_mean(name.replace("-", "_"), keys_of(Config))
            if equals
            else ""
        ):
            rule += f"; keys have no dashes{key.removesuffix('?')}={value}?"
        else:
            rule += "; --hydra-help lists them"
        found.append(Mistake(flag, "", rule))
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
