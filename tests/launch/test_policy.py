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
        ([0, 42], Verdict.again, 42),  # one process had ended before the notice
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
def test_codes_of_processes_give_a_verdict_and_one_code(codes, verdict, code):
    assert judge(codes) == (verdict, code)


def test_every_code_of_training_has_a_verdict():
    codes = {v for k, v in vars(exits).items() if k.isupper() and isinstance(v, int)}
    verdicts = {code: judge([code])[0] for code in codes}
    assert verdicts.pop(exits.FINISHED) is Verdict.done
    assert verdicts.pop(exits.CRASHED) is Verdict.crashed
    restart_codes = {
        code for code, verdict in verdicts.items() if verdict is Verdict.again
    }
    assert restart_codes == {exits.PREEMPTED, exits.ABORTED, exits.OWNED}
    assert {verdicts[code] for code in set(verdicts) - restart_codes} == {Verdict.stop}


def test_the_documentation_gives_every_code_its_row():
    text = (REPOSITORY / "docs/guides/launching.md").read_text()
    table = text.partition("| how it ended |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    restarts = {
        int(n): restart for ending, restart in rows for n in re.findall(r"\d+", ending)
    }
    assert {*restarts} == {exits.FINISHED, *RESTART_CODES, *NO_RESTART_CODES}
    for code, restart in restarts.items():
        unlimited = judge([code])[0] is Verdict.again
        assert ("again, without limit" in restart) is unlimited, code
        assert (restart.strip() == "never") is not unlimited, code


def test_pauses_double_up_to_a_limit():
    assert [backoff(n, 10) for n in (1, 2, 3, 7, 8)] == [10, 20, 40, 600, 600]
    assert backoff(1000, 1) == LONGEST_BACKOFF_S
