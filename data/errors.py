"""The errors that this package raises about data, and a mistake in a config."""

from typing import NamedTuple


class DataError(Exception):
    """Data is missing or damaged. A command that raises this error exits with 65.

    The message names the path, what is wrong there, and the remedy.
    """


class MissingPackageError(DataError):
    """An optional package is not installed. A command exits with 78, as of a config.

    The message names the package, and the command that installs it.
    """


class Mistake(NamedTuple):
    """One mistake in a config.

    key: the full key.
    value: the value of the key. With "", the message shows only the key.
    rule: the text of the message: what is wrong, the rule and the remedy.
    related: other keys that the rule reads, or that the user may have meant.
    """

    key: str
    value: object
    rule: str
    related: tuple[str, ...] = ()
