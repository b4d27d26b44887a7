"""Arguments as typed, made into overrides that Hydra reads as they are meant."""

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from train.cli.flags import is_sweep, parse_flags
from train.cli.hints import bare_type, type_of
from train.cli.schema import OLD_NAMES

_CHOICES = {"tracker.name": "tracker"}  # keys that choose of a group today
# A value of a sweep that is quoted, or is not.
_VALUE = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?:\\.|[^\\,()"'])+""", re.DOTALL
)


def hydra_text(key: str, value: str) -> str:
    """Return an override of a text key that Hydra's grammar cannot misread."""
    return f"{key}={_in_quotes(value)}"


def _in_quotes(value: str) -> str:
    # Inside quotes Hydra reads \\ as a backslash only in front of a quote.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'"{escaped}"'


def quote_text(argv: Sequence[str], schema: type) -> list[str]:
    """Return the arguments with that quoted which Hydra's grammar would misread.

    So `prompt='def f('`, `data.path=a,b` and `run.name=1.10` say what they seem to.
    Values that are quoted already, null, and the sweeps of `--multirun` stay, but for
    numbers among their values. A table takes new entries: Hydra wants that said with
    ++. A key's old name becomes the one of today.
    """
    sweeps = is_sweep(parse_flags(argv))
    parser = OverridesParser.create()

    def quoted(argument: str) -> str:
        key, equals, value = argument.partition("=")
        name = key.lstrip("+~")
        key = key.replace(name, {**OLD_NAMES, **_CHOICES}.get(name, name))
        hint, in_table = type_of(schema, key)
        key = f"++{key}" if equals and in_table else key
        if not equals or bare_type(hint) is not str:
            return f"{key}{equals}{value}"
        parsed = _parsed(parser, value)
        if parsed is not None and parsed.is_sweep_override() and sweeps:
            if parsed.is_choice_sweep():
                value = _VALUE.sub(lambda one: _as_text(parser, one[0]), value)
            return f"{key}={value}"
        stays = _is_text(parsed) and value == value.strip()
        return f"{key}={value}" if stays else hydra_text(key, value)

    return [quoted(argument) for argument in argv]


def _parsed(parser: OverridesParser, value: str) -> Override | None:
    """Read a value as Hydra does; None if it cannot."""
    try:
        return parser.parse_override(f"key={value}")
    except HydraException:
        return None


def _is_text(parsed: Override | None) -> bool:
    """Tell whether Hydra makes text of a value, or null, and not a number, say."""
    return parsed is not None and isinstance(parsed.value(), str | None)


def _as_text(parser: OverridesParser, value: str) -> str:
    """Return one value of a sweep, in quotes if it would be a number or the like."""
    parsed = _parsed(parser, value)
    stays = parsed is None or not value.strip() or _is_text(parsed)
    return value if stays else _in_quotes(value.strip())
