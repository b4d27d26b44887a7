"""Of what the libraries say, only a failed save's thousand lines are left out."""

import logging
import sys
from types import SimpleNamespace

from absl import logging as orbax_logging

from train.run.orbax_fixes import quiet_failed_saves


def test_tracebacks_of_orbax_are_left_out(caplog):
    quiet_failed_saves()
    try:
        raise OSError("no space left")
    except OSError:
        orbax_logging.exception("a save failed")
        logging.getLogger("another").exception("a mistake")
    orbax_logging.warning("a warning")
    assert [r.getMessage() for r in caplog.records] == ["a mistake", "a warning"]


def test_what_is_told_to_a_closed_loop_is_left_out(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    quiet_failed_saves.cache_clear()
    quiet_failed_saves()
    for message in ("Event loop is closed", "another"):
        found = SimpleNamespace(exc_value=RuntimeError(message))
        sys.unraisablehook(found)
    assert said == [found]
