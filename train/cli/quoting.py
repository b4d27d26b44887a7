"""Quote text in arguments that Hydra's grammar would misread."""

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from train.cli.compat import override_parser
from train.cli.flags import is_sweep, parse_flags
from train.cli.hints import bare_type, type_of

# Matches one value of a sweep, with or without quotes.
_VALUE = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?:\\.|[^\\,()"'])+""", re.DOTALL
)


def hydra_text(key: str, value: str) -> str:
    """Return `key=value` with the value in quotes, which Hydra reads as text."""
    return f"{key}={_quote(value)}"


def _quote(value: str) -> str:
    # Hydra unescapes backslashes only before a quote, which may be the closing one.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'"{escaped}"'


def quote_text(argv: Sequence[str], schema: type) -> list[str]:
    """Return the arguments, quoting text that Hydra's grammar would misread.

    Examples are `prompt='def f('`, `data.path=a,b` and `run.name=1.10`. Quoted values,
    null, and the sweeps of `--multirun` are not changed, except that numbers in a sweep
    over a text key are quoted. An entry of a table gets the ++ that Hydra requires.
    """
    is_multirun = is_sweep(parse_flags(argv))
    parser = override_parser()

    def quote_argument(argument: str) -> str:
        key, equals, value = argument.partition("=")
        hint, in_table = type_of(schema, key)
        key = f"++{key}" if equals and in_table else key
        kind = bare_type(hint)
        # `input` of data.prepare holds one text, or a list of texts in brackets.
        is_inputs = kind is Any and not in_table and not value.startswith("[")
        is_text = kind is str or is_inputs
        if not equals or not is_text:
            return f"{key}{equals}{value}"
        parsed = _parse_value(parser, value)
        if parsed is not None and parsed.is_sweep_override() and is_multirun:
            if parsed.is_choice_sweep():
                value = _VALUE.sub(lambda m: _quote_sweep_value(parser, m[0]), value)
            return f"{key}={value}"
        needs_no_quotes = _is_text(parsed) and value == value.strip()
        return f"{key}={value}" if needs_no_quotes else hydra_text(key, value)

    return [quote_argument(argument) for argument in argv]


def _parse_value(parser: OverridesParser, value: str) -> Override | None:
    """Return the override `key=value` as Hydra parses it, or None if Hydra cannot."""
    try:
        return parser.parse_override(f"key={value}")
    except HydraException:
        return None


def _is_text(parsed: Override | None) -> bool:
    """Return whether Hydra reads a value as text or null."""
    return parsed is not None and isinstance(parsed.value(), str | None)


def _quote_sweep_value(parser: OverridesParser, value: str) -> str:
    """Return one value of a sweep, in quotes if Hydra would not read it as text."""
    parsed = _parse_value(parser, value)
    needs_no_quotes = parsed is None or not value.strip() or _is_text(parsed)
    return value if needs_no_quotes else _quote(value.strip())
