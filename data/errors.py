"""The error that this package raises about data."""


class DataError(Exception):
    """The data is missing or damaged. Commands exit with 65.

    The message names the path, the rule that it breaks and the remedy.
    """
