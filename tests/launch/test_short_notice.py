from dataclasses import replace

import pytest

from launch.short_notice import warn_of_short_notice
from tests.launch.kinds import JOB


@pytest.mark.parametrize(
    ("staged", "events", "said"),
    [
        (None, "", None),
        (14 << 30, "", "takes some 15 s, estimated"),
        (13 << 30, "", None),
        (1, '{"event": "save", "seconds": 16.2}\n', "took 16 s or more in this run"),
        (None, '{"event": "save", "seconds": 16.2}\n{"event": "x"}\n', "took 16 s"),
        # The loop stood still for a copy in memory; then it was written.
        (14 << 30, '{"event": "save", "seconds": 3}\n', "takes some 15 s, estimated"),
        (13 << 30, '{"event": "save", "seconds": 3}\n', None),
        (14 << 30, '{"event": "save", "sec', "estimated"),
    ],
)
def test_a_notice_too_short_to_save_in_is_said(tmp_path, caplog, staged, events, said):
    (tmp_path / "events.jsonl").write_text(events)
    job = replace(JOB, run_dir=str(tmp_path), staged_bytes=staged)
    warn_of_short_notice(job, 15, "spot nodes leave")
    assert (said is not None) == ("spot nodes leave 15 s, but a save" in caplog.text)
    assert (said or "") in caplog.text
