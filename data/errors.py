"""The errors that this package raises about data."""


class DataError(Exception):
    """Data is missing or damaged. A command that raises this error exits with 65.

    The message names the path, what is wrong there, and the remedy.
    """


class MissingPackageError(DataError):
    """An optional package is not installed. A command exits with 78, as of a config.

    The message names the package, and the command that installs it.
    """
