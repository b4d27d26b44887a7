"""Hydra's flags (`--multirun`, `--cfg job`, ...) and the mistakes in them."""

import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from train.cli.compat import flag_actions, flags_parser
from train.cli.hints import did_you_mean, keys_of, similar_names
from train.cli.other_trainers import called_here, name_here
from train.config import Config
from train.errors import ConfigError, Mistake

_KEY = r"[\w.+~]+"


def without_spaced(argv: Sequence[str]) -> tuple[list[str], list[Mistake]]:
    """Return the arguments without overrides that have spaces around =, and those."""
    words, spaced_right, mistakes = list(argv), list[str](), list[Mistake]()
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
            spaced_right.append(first)
    return spaced_right, mistakes


def parse_flags(argv: Sequence[str]) -> Namespace:
    """Parse Hydra's flags; `.overrides` holds the rest.

    Raises:
        ConfigError: for a flag that lacks its value, or takes none.
    """
    parser = flags_parser()

    def error(message: str) -> NoReturn:
        raise ConfigError([Mistake("command line", "", message)])

    parser.error = error
    for action in flag_actions(parser):
        action.choices = None  # `flag_mistakes` checks them with everything else
    flags, remaining_args = parser.parse_known_args(flags_first(argv))
    flags.unknown = [text for text in remaining_args if text.startswith("-")]
    flags.overrides += [text for text in remaining_args if not text.startswith("-")]
    return flags


def flags_first(argv: Sequence[str]) -> list[str]:
    """Move overrides after the flags, since argparse takes them in one place only."""
    return sorted(argv, key=lambda a: a[0:1] == "~" or ("=" in a and a[0:1] != "-"))


def is_sweep(flags: Namespace) -> bool:
    """Return whether Hydra will run several jobs."""
    return flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides


def flag_mistakes(flags: Namespace) -> list[Mistake]:
    """List flags that do not exist, exclude each other, or are not supported."""
    actions, mistakes = flag_actions(flags_parser()), list[Mistake]()
    for action in actions:
        value, choices = getattr(flags, action.dest, None), list(action.choices or ())
        if choices and value not in (None, *choices):
            rule = f"must be one of {', '.join(choices)}"
            mistakes.append(Mistake(f"--{action.dest}", value, rule))
    options = [option for action in actions for option in action.option_strings]
    for flag in flags.unknown:
        name, _, value = flag.lstrip("-").partition("=")
        rule = "there is no such flag" + did_you_mean(similar_names(flag, options))
        typed, keys = name.replace("-", "_"), keys_of(Config)
        similar = similar_names(typed, keys)
        if translation := name_here(typed, keys):
            rule += f"; keys have no dashes, and {called_here(translation)}"
        elif similar and "=" in flag:
            rule += f"; keys have no dashes{did_you_mean(similar)[:-1]}={value}?"
        else:
            rule += "; --hydra-help lists them"
        mistakes.append(Mistake(flag, "", rule))
    modes = ("run", "cfg", "multirun", "info", "shell_completion")
    chosen = [f"--{m.replace('_', '-')}" for m in modes if getattr(flags, m)]
    if len(chosen) > 1:
        rule = "exclude each other; give one"
        mistakes.append(Mistake(" and ".join(chosen), "", rule))
    if flags.resolve and not (flags.cfg or flags.help):
        mistakes.append(Mistake("--resolve", "", "is only possible with --cfg"))
    for name in ("config_path", "experimental_rerun"):
        if getattr(flags, name):
            rule = "is not supported; your own presets go into --config-dir <folder>"
            mistakes.append(Mistake(f"--{name.replace('_', '-')}", "", rule))
    if flags.config_dir and not Path(flags.config_dir).is_dir():
        mistakes.append(Mistake("--config-dir", flags.config_dir, "is not a folder"))
    return mistakes
