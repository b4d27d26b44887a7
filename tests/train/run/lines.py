"""The rows that a log holds, and what was said meanwhile."""

from typing import Any

import pytest

from train.run.jsonl_reader import iterate_rows, newest_rows


def numbers(run_dir: Any) -> list[int]:
    found = [row["n"] for row in iterate_rows(run_dir, "log")]
    assert [row["n"] for row in newest_rows(run_dir, "log")] == found[::-1]
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]
