import re

import pytest

from launch.policy import (
    LONGEST_BACKOFF_S,
    NO_RESTART_CODES,
    RESTART_CODES,
    Verdict,
    backoff,
    judge,
)
from tests.fleet import REPOSITORY
from train import errors as exits


@pytest.mark.parametrize(
    ("codes", "verdict", "code"),
    [
        ([0, 0], Verdict.done, 0),
        ([42, 42], Verdict.again, 42),
        ([0, 42], Verdict.again, 42),  # one had ended when the notice came
        ([134], Verdict.again, 134),
        ([None, 134], Verdict.again, 134),
        ([0, None], Verdict.again, 134),
        ([137, 134, 134], Verdict.crashed, 137),
        ([134, 1], Verdict.crashed, 1),
        ([139], Verdict.crashed, 139),
        ([78, 134], Verdict.stop, 78),
        ([70, 1], Verdict.stop, 70),
        ([130, 0], Verdict.stop, 130),
    ],
)
def test_what_codes_mean(codes, verdict, code):
    assert judge(codes) == (verdict, code)


def test_every_code_of_training_has_its_place():
    named = {v for k, v in vars(exits).items() if k.isupper() and isinstance(v, int)}
    found = {code: judge([code])[0] for code in named}
    assert found.pop(exits.FINISHED) is Verdict.done
    assert found.pop(exits.CRASHED) is Verdict.crashed
    again = {code for code, verdict in found.items() if verdict is Verdict.again}
    assert again == {exits.PREEMPTED, exits.ABORTED, exits.OWNED}
    assert {found[code] for code in set(found) - again} == {Verdict.stop}


def test_the_documentation_gives_every_code_its_row():
    text = (REPOSITORY / "docs/guides/launching.md").read_text()
    table = text.partition("| how it ended |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    said = {int(n): then for ended, then in rows for n in re.findall(r"\d+", ended)}
    assert {*said} == {exits.FINISHED, *RESTART_CODES, *NO_RESTART_CODES}
    for code, then in said.items():
        free = judge([code])[0] is Verdict.again
        assert ("again, without limit" in then) is free, code
        assert (then.strip() == "never") is not free, code


def test_pauses_double_up_to_a_limit():
    assert [backoff(n, 10) for n in (1, 2, 3, 7, 8)] == [10, 20, 40, 600, 600]
    assert backoff(1000, 1) == LONGEST_BACKOFF_S
