"""The error that this package raises about data."""


class DataError(Exception):
    """Data is missing or damaged. A command that raises this error exits with 65.

    The message names the path, what is wrong there, and the remedy.
    """
