"""The slices of slow tests that `.ci/run` takes."""

from tests.fleet import REPOSITORY
from tests.slow_slice import BUDGET_S, chosen, listed, seconds_of

NAMES = [f"tests/test_{number}.py::test" for number in range(100)]


def test_every_test_that_fits_has_its_turn(monkeypatch):
    seconds = {NAMES[3]: BUDGET_S + 1.0, NAMES[7]: BUDGET_S - 1.0, NAMES[8]: 100.0}
    monkeypatch.setattr("tests.slow_slice.listed", lambda: seconds)
    turns = [chosen(NAMES, number) for number in range(len(NAMES))]
    assert set().union(*turns) == {*NAMES} - {NAMES[3]}
    for names in turns:
        assert 0 < sum(map(seconds_of, names)) <= BUDGET_S


def test_the_list_names_tests_that_there_are():
    for name in listed():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (REPOSITORY / file).read_text()
