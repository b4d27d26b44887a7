"""Parse and check Hydra's flags (`--multirun`, `--cfg job`, ...)."""

import os
from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from data.errors import Mistake
from train.cli.compat import flag_actions, flags_parser
from train.cli.hints import did_you_mean, keys_of, similar_names
from train.cli.other_trainers import translate
from train.config import Config
from train.errors import ConfigError


def parse_flags(argv: Sequence[str]) -> Namespace:
    """Return Hydra's flags, with `overrides` and the `unknown` flags as attributes.

    Raises:
        ConfigError: if a flag lacks its value, or has a value but takes none.
    """
    parser = flags_parser()

    def error(message: str) -> NoReturn:
        raise ConfigError([Mistake("command line", "", message)])

    parser.error = error
    for action in flag_actions(parser):
        action.choices = None  # `flag_mistakes` checks them, and lists all mistakes
    flags, remaining_args = parser.parse_known_args(flags_first(argv))
    flags.unknown = [text for text in remaining_args if text.startswith("-")]
    flags.overrides += [text for text in remaining_args if not text.startswith("-")]
    return flags


def flags_first(argv: Sequence[str]) -> list[str]:
    """Return the arguments with all overrides last, as argparse needs them."""
    return sorted(argv, key=lambda a: a[0:1] == "~" or ("=" in a and a[0:1] != "-"))


def key_of(override: str) -> str:
    """Return the key in an override such as `+key=value` or `~key`."""
    return override.lstrip("+~").partition("=")[0]


def is_sweep(flags: Namespace) -> bool:
    """Return whether the command line is a sweep (`--multirun`)."""
    return flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides


def flag_mistakes(flags: Namespace) -> list[Mistake]:
    """Return the mistakes: unknown, unsupported or mutually exclusive flags."""
    actions = flag_actions(flags_parser())
    mistakes = list[Mistake]()

    def add_mistake(flag: str, rule: str, value: object = "") -> None:
        mistakes.append(Mistake(flag, value, rule))

    for action in actions:
        value = getattr(flags, action.dest, None)
        choices = list(action.choices or ())
        choices += ["schema"] * (action.dest == "cfg")  # Hydra has no such choice
        if choices and value not in (None, *choices):
            add_mistake(
                f"--{action.dest}", f"must be one of {', '.join(choices)}", value
            )
    options = [option for action in actions for option in action.option_strings]
    for flag in flags.unknown:
        add_mistake(flag, _unknown_flag_rule(flag, options))
    modes = ("run", "cfg", "multirun", "info", "shell_completion")
    chosen = [f"--{m.replace('_', '-')}" for m in modes if getattr(flags, m)]
    if len(chosen) > 1:
        add_mistake(" and ".join(chosen), "exclude each other; give one")
    if flags.resolve and not (flags.cfg or flags.help):
        add_mistake("--resolve", "is only possible with --cfg")
    if flags.package and flags.cfg == "schema":
        add_mistake("--package", "is not possible with --cfg schema", flags.package)
    for name in ("config_path", "experimental_rerun"):
        if getattr(flags, name):
            rule = "is not supported; your own presets go into --config-dir <folder>"
            add_mistake(f"--{name.replace('_', '-')}", rule)
    # Path.is_dir raises OSError if the name is too long.
    if flags.config_dir and not os.path.isdir(flags.config_dir):  # noqa: PTH112
        add_mistake("--config-dir", "is not a folder", flags.config_dir)
    return mistakes


def _unknown_flag_rule(flag: str, options: Sequence[str]) -> str:
    """Return the rule for an unknown flag, with the flag or key that may be meant."""
    name, _, value = flag.lstrip("-").partition("=")
    key = name.replace("-", "_")
    keys = keys_of(Config)
    rule = "there is no such flag" + did_you_mean(similar_names(f"--{name}", options))
    sentence, _ = translate(key, keys)
    if sentence:
        return f"{rule}; keys have no dashes, and {sentence}"
    similar = similar_names(key, keys)
    if similar and "=" in flag:
        return f"{rule}; keys have no dashes{did_you_mean(similar)[:-1]}={value}?"
    return f"{rule}; --hydra-help lists them"
