"""`pytest -p tests.slow_slice --slice=COMMIT -m ""`: what every change must pass.

All fast tests, the drills of promises, and a slice of the other slow tests: in their
order, from one on that the commit chooses, as many as fill BUDGET_S. `.ci/slow` holds
the seconds of those that take long; what takes longer than the budget is left to
`.ci/full`. Drills of promises come first: they often wait, while others compute.

`--third=COMMIT` keeps of the model's tests every third, in turn.
"""

import functools
from pathlib import Path

import pytest

BUDGET_S = 110  # on one core
OTHERS_S = 10  # of a test that is not in the list
LIST = Path(__file__).parents[1] / ".ci/slow"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="COMMIT", help="leave out other slow tests")
    parser.addoption("--third", metavar="COMMIT", help="keep a third of tests/model")


@pytest.hookimpl(trylast=True)  # after those of -m and -k
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if commit := config.getoption("third"):
        left = {*two_thirds([item.nodeid for item in items], int(commit[:8], 16))}
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
    drills = [item for item in items if item.get_closest_marker("promise")]
    drills.sort(key=lambda item: -seconds_of(item.nodeid))
    others = [item for item in items if item not in drills]
    if commit := config.getoption("slice"):
        slow = [item.nodeid for item in others if item.get_closest_marker("slow")]
        left = {*slow} - chosen(slow, int(commit[:8], 16))
        gone = [item for item in others if item.nodeid in left]
        config.hook.pytest_deselected(items=gone)
        others = [item for item in others if item.nodeid not in left]
    items[:] = drills + others


def chosen(names: list[str], number: int) -> set[str]:
    """Return the names of a slice."""
    seconds = {name: seconds_of(name) for name in names}
    fit = [name for name in names if seconds[name] <= BUDGET_S]
    first = number % max(1, len(fit))
    picked, sum_s = set[str](), 0.0
    for name in fit[first:] + fit[:first]:
        sum_s += seconds[name]
        if sum_s > BUDGET_S:
            break
        picked.add(name)
    return picked


def two_thirds(names: list[str], number: int) -> list[str]:
    """Return the names of the model's tests that are left out."""
    model = [name for name in names if name.startswith("tests/model/")]
    return [name for place, name in enumerate(model) if (place - number) % 3]


def seconds_of(name: str) -> float:
    """Return the seconds of a test."""
    return listed().get(name, OTHERS_S)


@functools.cache
def listed() -> dict[str, float]:
    """Return the seconds of tests by their names."""
    lines = [line.split(maxsplit=1) for line in LIST.read_text().splitlines()]
    return {name: float(s) for s, name in lines if s != "#"}
