"""Hydra's flags (`--multirun`, `--cfg job`, ...) and the mistakes in them."""

import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from train.cli.hints import did_you_mean, keys_of
from train.cli.other_trainers import name_here
from train.config import Config
from train.errors import ConfigError, Mistake

_KEY = r"[\w.+~]+"


def without_spaced(argv: Sequence[str]) -> tuple[list[str], list[Mistake]]:
    """Return the arguments without overrides that have spaces around =, and these."""
    words, joined, mistakes = list(argv), list[str](), list[Mistake]()
    while words:
        first = word = words.pop(0)
        if words and words[0].startswith("=") and re.fullmatch(_KEY, word):
            word += f" {words.pop(0)}"
        follows = words and not re.match(f"-+[a-z]|~|{_KEY}=", words[0])
        if follows and re.fullmatch(f"{_KEY} *=", word):
            word += f" {words.pop(0)}"
        if word != first or re.match(f"{_KEY} +=", word):
            key, value = (part.strip() for part in word.split("=", 1))
            rule = "must be one word, without spaces around =; type "
            rule += shlex.quote(f"{key}={value}")
            mistakes.append(Mistake(key.lstrip("+~"), value, rule))
        else:
            joined.append(first)
    return joined, mistakes


def parse_flags(argv: Sequence[str]) -> Namespace:
    """Parse Hydra's flags; `.overrides` holds the rest.

    Raises:
        ConfigError: for a flag that lacks its value, or takes none.
    """
    parser = get_args_parser()

    def error(message: str) -> NoReturn:
        raise ConfigError([Mistake("command line", "", message)])

    parser.error = error
    for action in parser._actions:
        action.choices = None  # `flag_mistakes` lists these with all else
    flags, overrides = parser.parse_known_args(flags_first(argv))
    flags.unknown = [text for text in overrides if text.startswith("-")]
    flags.overrides += [text for text in overrides if not text.startswith("-")]
    return flags


def flags_first(argv: Sequence[str]) -> list[str]:
    """Move overrides behind flags: argparse takes them in one place only."""
    return sorted(argv, key=lambda a: a[0:1] == "~" or ("=" in a and a[0:1] != "-"))


def is_sweep(flags: Namespace) -> bool:
    """Return whether Hydra will run several jobs."""
    return flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides


def flag_mistakes(flags: Namespace) -> list[Mistake]:
    """List flags that do not exist, that exclude each other or that we lack."""
    actions, mistakes = get_args_parser()._actions, list[Mistake]()
    for action in actions:
        value, choices = getattr(flags, action.dest, None), list(action.choices or ())
        if choices and value not in (None, *choices):
            rule = f"must be one of {', '.join(choices)}"
            mistakes.append(Mistake(f"--{action.dest}", value, rule))
    options = [option for action in actions for option in action.option_strings]
    for flag in flags.unknown:
        name, _, value = flag.lstrip("-").partition("=")
        rule = "there is no such flag" + did_you_mean(flag, options)
        typed, keys = name.replace("-", "_"), keys_of(Config)
        key = did_you_mean(typed, keys)
        if our_name := name_here(typed, keys):
            rule += f"; keys have no dashes, and {our_name}"
        elif key and "=" in flag:
            rule += f"; keys have no dashes{key.removesuffix('?')}={value}?"
        else:
            rule += "; --hydra-help lists them"
        mistakes.append(Mistake(flag, "", rule))
    modes = ("run", "cfg", "multirun", "info", "shell_completion")
    modes_given = [f"--{m.replace('_', '-')}" for m in modes if getattr(flags, m)]
    unsupported = "is not supported; presets of your own go into --config-dir <folder>"
    folder = flags.config_dir
    checks = [
        (
            len(modes_given) > 1,
            " and ".join(modes_given),
            "",
            "exclude each other; give one",
        ),
        (
            flags.resolve and not (flags.cfg or flags.help),
            *("--resolve", "", "goes with --cfg only"),
        ),
        (flags.config_path, "--config-path", "", unsupported),
        (flags.experimental_rerun, "--experimental-rerun", "", unsupported),
        (
            folder and not Path(folder).is_dir(),
            *("--config-dir", folder, "is not a folder"),
        ),
    ]
    return mistakes + [Mistake(*mistake) for applies, *mistake in checks if applies]
