"""The program under test: that of this clone, or an installed wheel (tests/wheel.py).

In a wheel, modules such as `train.start` are called `longhaul.train.start`.
"""

import pytest

from data.program import PREFIX
from longhaul.wheel import with_moved_imports

# The path of the packages below the folder that PYTHONPATH names: "" or "longhaul/".
PACKAGES_PATH = PREFIX.replace(".", "/")
SOURCE_TREE = pytest.mark.skipif(
    bool(PREFIX), reason="is about the files of a clone, which no wheel has"
)


def module_option(module: str) -> list[str]:
    """Return the option of `python` that runs a module of the program."""
    return ["-m", PREFIX + module]


def program_code(source: str) -> str:
    """Return code for another process, with imports as the program's layout needs."""
    return with_moved_imports(source) if PREFIX else source
