"""An assignment gives one value to one name."""

import ast

import pytest

from tests.fleet import REPOSITORY
from tests.program import SOURCE_TREE

FOLDERS = ("model", "data", "train", "launch", "longhaul", "tests", "benchmarks")


def assigns_several_values(node: ast.AST) -> bool:
    """Return whether a statement is `a, b = x, y`, and does not exchange values."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    targets = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return not targets & values


@pytest.mark.parametrize(
    ("statement", "expected"),
    [("a, b = x, y", True), ("a, b = b, a", False), ("a, b = pair", False)],
)
def test_swaps_and_unpackings_are_allowed(statement, expected):
    assert assigns_several_values(ast.parse(statement).body[0]) is expected


@SOURCE_TREE
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_statement_assigns_one_value(folder):
    locations = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and assigns_several_values(node)
    ]
    assert not locations, "write one assignment a line"
