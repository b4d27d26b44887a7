"""Programs compiled for machines that are not there."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.train.compiled import compile_ahead


class Compiled(NamedTuple):
    """What came of one case of ahead.py."""

    text: str = ""
    seconds: float = 0.0
    memory: dict[str, int] | None = None
    error: str | None = None

    def products(self) -> list[tuple[str, str, str]]:
        """(operand dtype, operand dtype, op_name) of each `dot` or matrix product."""
        found = []
        for computation in self.text.split("\n\n"):
            dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", computation))
            dtypes |= dict(re.findall(r"([\w.-]+): (\w+)\[", computation))
            for line in re.findall(r".* (?:dot|convolution)\(.*", computation):
                names = re.search(r" (?:dot|convolution)\(([^)]*)\)", line)[1]
                a, b = (dtypes[name.strip()] for name in names.split(","))
                op = re.search(r'op_name="([^"]*)"', line)
                found.append((a, b, op[1] if op else ""))
        return found

    def of_linear_layers(self) -> list[tuple[str, str]]:
        """Operands' dtypes of each product, but for those of the head."""
        products = self.products()
        return [(a, b) for a, b, name in products if "part.head" not in name]

    def square_buffers(self, T: int) -> set[tuple[int, ...]]:
        """Shapes of all values that end in [T, T]."""
        shapes = re.findall(rf"\w+\[((?:\d+,)*){T},{T}\]", self.text)
        return {(*(int(n) for n in s.split(",") if n), T, T) for s in shapes}


@pytest.fixture(scope="session")
def compile_cases(tmp_path_factory) -> Callable[[dict], dict[str, Compiled]]:
    """Compile cases (see ahead.py) in one process; give them by name."""

    def compile_cases(cases: dict) -> dict[str, Compiled]:
        folder = tmp_path_factory.mktemp("ahead")
        compiled = {}
        for name, result in compile_ahead(cases, folder).items():
            text = "" if "error" in result else (folder / f"{name}.txt").read_text()
            compiled[name] = Compiled(text, **result)
            print(name, result)
        return compiled

    return compile_cases
