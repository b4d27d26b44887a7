import time

from tests.train.pages import data_of
from train.run.live_report import LiveReport


def test_a_live_page_is_reloaded_until_the_run_ends(tmp_path, monkeypatch):
    report = tmp_path / "report.html"
    live = LiveReport(tmp_path)
    live.update()
    assert live._thread is None  # it is not yet time
    live._due_s = 0.0
    live.update()
    assert live._thread is not None
    live._thread.join()
    assert data_of(report.read_text())["live"] is True
    assert live._due_s > time.monotonic()
    live.close()
    assert data_of(report.read_text())["live"] is False
