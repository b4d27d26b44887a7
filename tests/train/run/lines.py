"""These functions read the rows of a log and the messages that were logged."""

from typing import Any

import pytest

from train.run.jsonl_reader import iterate_rows, newest_rows


def numbers(run_dir: Any) -> list[int]:
    values = [row["n"] for row in iterate_rows(run_dir, "log")]
    assert [row["n"] for row in newest_rows(run_dir, "log")] == values[::-1]
    return values


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]
