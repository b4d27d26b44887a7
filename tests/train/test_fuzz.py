"""No start of any command ends with a traceback or an unknown exit code.

600 cases of words and damaged files are drawn from a seed (`fuzz.py`), always the same.
Run more cases, or others, with

    FUZZ_SEED=7 FUZZ_CASES=5000 pytest -m slow tests/train/test_fuzz.py
"""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.forks import ERR, OUT, Forks
from tests.program import module_option
from tests.train.fuzz import SMALL, case_of, furnish

SEED = int(os.environ.get("FUZZ_SEED", "53"))
CASES = int(os.environ.get("FUZZ_CASES", "600"))
PARTS = 12
HANGS_S = 300.0  # no case takes a tenth of this limit
CODES = {0, 1, 2, 3, 4, 5, 42, 65, 70, 75, 78, 130, 134}


@pytest.fixture(scope="module")
def finished(forks: Forks, tmp_path_factory) -> Path:
    """Train a run of two steps to its end."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 400)
    words = [word.replace("{dir}", str(folder)) for word in SMALL]
    result = forks.run(
        [*module_option("train"), f"run.dir={folder}/run", *words], folder
    )
    assert result.returncode == 0, result.stderr
    return folder / "run"


def run_case(forks: Forks, finished: Path, folder: Path, number: int) -> str:
    """Run a case; describe the mistake in how it ends, or return an empty string."""
    folder.mkdir()
    furnish(folder, finished)
    case = case_of(SEED, number, folder)
    case.do(folder / "run")
    workdir = folder / "empty"
    process = forks.start(case.words, workdir)
    limit = threading.Timer(HANGS_S, os.kill, (process, signal.SIGKILL))
    limit.start()
    code = forks.wait()
    limit.cancel()
    output = "".join(
        (workdir / name).read_text(errors="replace")[-20_000:] for name in (OUT, ERR)
    )
    shutil.rmtree(folder, ignore_errors=True)
    mistake = ""
    if "Traceback (most recent call last)" in output:
        mistake = "a traceback"
    elif code not in CODES:
        mistake = "an unknown code"
    if not mistake:
        return ""
    tail = "\n".join(output.splitlines()[-12:])
    return (
        f"case {number}: {mistake}, code {code}: {case.words} {case.damage}\n{tail}\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_case_ends_with_a_traceback(forks, finished, tmp_path, part):
    numbers = range(part, CASES, PARTS)
    results = [run_case(forks, finished, tmp_path / str(n), n) for n in numbers]
    mistakes = [text for text in results if text]
    assert not mistakes, "\n".join(mistakes)
