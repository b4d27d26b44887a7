"""How much code a reader can reach from a module stays bounded.

A closure is the modules that a module imports, directly and indirectly, also inside
functions. It may only shrink: lower a limit when a change allows it.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY

PACKAGES = ("train", "model", "data", "launch")
MAX_LINES = {
    "model.gpt": 6_100,
    "train.core.step": 14_600,
    "train.core.program": 16_700,
    "train.core.loop": 33_700,
    "train.start": 36_700,
}
# Imports inside functions that do not count, each with its reason.
EXCEPTIONS = {
    ("train.preflight", "train.plan"): "only with mesh=planned",
    ("train.start", "train.prove"): "only with runtime.prove_kernels=true",
}


def imported(module: str, path: Path, files: Mapping[str, Path]) -> set[str]:
    """Return the modules of the product that a module imports."""
    found, allowed = set(), {b for a, b in EXCEPTIONS if a == module}
    tree = ast.parse(path.read_text())
    top_level = set(tree.body)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names.append(node.module)
        for name in names:
            is_exception = node not in top_level and name.startswith(tuple(allowed))
            if name in files and not is_exception:
                found.add(name)
    return found


def closure(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    seen, pending = set(), [start]
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            pending += imports[module]
    return seen


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """The files of the product, by module."""
    paths = [path for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")]
    dotted = {
        ".".join(p.relative_to(REPOSITORY).with_suffix("").parts): p for p in paths
    }
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


@pytest.mark.parametrize(("module", "limit"), MAX_LINES.items())
def test_a_module_reaches_at_most_so_many_lines(files, module, limit):
    imports = {name: imported(name, path, files) for name, path in files.items()}
    reached = closure(module, imports)
    lines = sum(files[name].read_text().count("\n") for name in reached)
    assert lines <= limit, f"{module} reaches {lines} lines in {len(reached)} modules"


def test_exceptions_are_imports_inside_functions(files):
    for module, room in EXCEPTIONS:
        text = files[module].read_text()
        inside = [line for line in text.split("\n") if line.startswith("  ")]
        assert any(f"from {room}." in line for line in inside), (module, room)
