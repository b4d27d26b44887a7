"""Programs are compiled for machines that are absent, once for all tests."""

import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.train.compiled import compile_ahead


class Compiled(NamedTuple):
    """The result of one case of ahead.py."""

    text: str = ""
    seconds: float = 0.0
    memory: dict[str, int] | None = None
    error: str | None = None

    def products(self) -> list[tuple[str, str, str]]:
        """Return (operand dtype, operand dtype, op_name) of each dot or convolution."""
        results = []
        for computation in self.text.split("\n\n"):
            dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", computation))
            dtypes |= dict(re.findall(r"([\w.-]+): (\w+)\[", computation))
            for line in re.findall(r".* (?:dot|convolution)\(.*", computation):
                names = re.search(r" (?:dot|convolution)\(([^)]*)\)", line)[1]
                a, b = (dtypes[name.strip()] for name in names.split(","))
                op = re.search(r'op_name="([^"]*)"', line)
                results.append((a, b, op[1] if op else ""))
        return results

    def of_linear_layers(self) -> list[tuple[str, str]]:
        """Return the operand dtypes of each product outside the head."""
        products = self.products()
        return [(a, b) for a, b, name in products if "part.head" not in name]

    def square_buffers(self, T: int) -> set[tuple[int, ...]]:
        """Return the shapes of all values that end in [T, T]."""
        shapes = re.findall(rf"\w+\[((?:\d+,)*){T},{T}\]", self.text)
        return {(*(int(n) for n in s.split(",") if n), T, T) for s in shapes}


class Cases(dict[str, Compiled]):
    """Map names to cases of ahead.py, and compile each case on its first use.

    One pytest worker compiles a case, while the others wait and then read its result.
    """

    def __init__(self, cases: dict[str, Any], folder: Path):
        self._cases = cases
        self._folder = folder

    def __missing__(self, name: str) -> Compiled:
        result_file, text_file = (
            self._folder / f"{name}.{suffix}" for suffix in ("json", "txt")
        )
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result_file.exists():
                results = compile_ahead({name: self._cases[name]}, self._folder)
                result_file.write_text(json.dumps(results[name]))
        result = json.loads(result_file.read_text())
        print(name, result)
        compiled = Compiled(
            "" if "error" in result else text_file.read_text(), **result
        )
        return self.setdefault(name, compiled)


@pytest.fixture(scope="module")
def compile_cases(request) -> Callable[[dict], Cases]:
    """Return a function that makes the cases of a module."""
    # All workers share this folder, see tests/conftest.py.
    caches = Path(os.environ["XDG_CACHE_HOME"])
    folder = caches / request.module.__name__
    folder.mkdir(parents=True, exist_ok=True)
    return lambda cases: Cases(cases, folder)
