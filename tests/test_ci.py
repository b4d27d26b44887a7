"""The slices of slow tests that `.ci/run` takes."""

from tests.fleet import REPOSITORY
from tests.slow_slice import BUDGET_S, chosen, listed, seconds_of, two_thirds

NAMES = [f"tests/test_{number}.py::test" for number in range(100)]


def test_every_test_that_fits_has_its_turn(monkeypatch):
    seconds = {NAMES[3]: BUDGET_S + 1.0, NAMES[7]: BUDGET_S - 1.0, NAMES[8]: 100.0}
    monkeypatch.setattr("tests.slow_slice.listed", lambda: seconds)
    turns = [chosen(NAMES, number) for number in range(len(NAMES))]
    assert set().union(*turns) == {*NAMES} - {NAMES[3]}
    for names in turns:
        assert 0 < sum(map(seconds_of, names)) <= BUDGET_S


def test_every_test_of_the_model_is_in_one_third():
    model = [f"tests/model/test_{number}.py::test" for number in range(10)]
    thirds = [{*NAMES, *model} - {*two_thirds(NAMES + model, n)} for n in (5, 6, 7)]
    assert set.union(*thirds) == {*NAMES, *model}
    assert sum(map(len, thirds)) == 3 * len(NAMES) + len(model)


def test_the_list_names_tests_that_there_are():
    for name in listed():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (REPOSITORY / file).read_text()
