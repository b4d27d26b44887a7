"""Arguments as typed, made into overrides that Hydra reads as they are meant."""

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from train.cli.flags import is_sweep, parse_flags
from train.cli.hints import type_of
from train.cli.schema import OLD_NAMES

_CHOICES = {"tracker.name": "tracker"}  # keys that choose of a group today


def hydra_text(key: str, value: str) -> str:
    """Return an override of a text key that Hydra's grammar cannot misread."""
    # Inside quotes Hydra reads \\ as a backslash only in front of a quote.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'{key}="{escaped}"'


def quote_text(argv: Sequence[str], schema: type) -> list[str]:
    """Return the arguments with that quoted which Hydra's grammar would misread.

    So `prompt='def f('` and `data.path=a,b` say what they seem to. Values that are
    quoted already, null, and the sweeps of `--multirun` stay. A table takes new
    entries: Hydra wants that said with ++. A key's old name becomes the one of today.
    """
    sweeps = is_sweep(parse_flags(argv))
    parser = OverridesParser.create()

    def quoted(argument: str) -> str:
        key, equals, value = argument.partition("=")
        name = key.lstrip("+~")
        key = key.replace(name, {**OLD_NAMES, **_CHOICES}.get(name, name))
        hint, in_table = type_of(schema, key)
        key = f"++{key}" if equals and in_table else key
        if not equals or hint not in (str, str | None):
            return f"{key}{equals}{value}"
        try:
            parsed = parser.parse_override(f"{key}={value}")
            if parsed.is_sweep_override():
                stays = sweeps
            else:
                one = not isinstance(parsed.value(), list | dict | bool)
                stays = one and value == value.strip()
        except HydraException:
            stays = False
        return f"{key}={value}" if stays else hydra_text(key, value)

    return [quoted(argument) for argument in argv]
