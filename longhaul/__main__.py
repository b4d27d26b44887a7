"""The script `longhaul`, and `python -m longhaul`: run a command by its name."""

from typing import NoReturn

from longhaul.catalog import CATALOG
from longhaul.commands import run


def script() -> NoReturn:
    """Run the command that the arguments name, and exit with its code."""
    run(CATALOG, ("longhaul",))


if __name__ == "__main__":
    script()
