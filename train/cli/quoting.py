"""Quote arguments, so that Hydra reads them as the user means them."""

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from train.cli.compat import override_parser
from train.cli.flags import is_sweep, parse_flags
from train.cli.hints import bare_type, type_of
from train.cli.schema import OLD_NAMES

_CHOICES = {"tracker.name": "tracker"}  # older keys that are groups today
# One value of a sweep, quoted or not.
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
    """Return the arguments, with text quoted that Hydra's grammar would misread.

    So `prompt='def f('`, `data.path=a,b` and `run.name=1.10` mean what they say.
    Quoted values, null, and the sweeps of `--multirun` stay as they are, except numbers
    among the values of a sweep. A new entry of a table gets the ++ that Hydra requires,
    and an older name of a key is replaced by the current one.
    """
    sweeps = is_sweep(parse_flags(argv))
    parser = override_parser()

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
    """Read a value as Hydra does; None if Hydra cannot."""
    try:
        return parser.parse_override(f"key={value}")
    except HydraException:
        return None


def _is_text(parsed: Override | None) -> bool:
    """Return whether Hydra reads a value as text or null."""
    return parsed is not None and isinstance(parsed.value(), str | None)


def _as_text(parser: OverridesParser, value: str) -> str:
    """Return one value of a sweep, in quotes if Hydra would not read it as text."""
    parsed = _parsed(parser, value)
    stays = parsed is None or not value.strip() or _is_text(parsed)
    return value if stays else _in_quotes(value.strip())
