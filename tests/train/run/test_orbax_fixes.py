"""Of what the libraries say, only a failed save's thousand lines are left out."""

import logging

from absl import logging as absl_logging
from orbax.checkpoint import checkpoint_manager

from train.run.orbax_fixes import quiet_failed_saves


def test_of_absls_tracebacks_only_those_of_orbax_are_left_out(caplog):
    quiet_failed_saves()
    written = logging.getLogger("absl").makeRecord
    try:
        raise OSError("no space left")
    except OSError as error:
        absl_logging.exception("a mistake of another library")
        about = (type(error), error, error.__traceback__)
        for message, exc_info in (("a save failed", about), ("a save is late", None)):
            place = checkpoint_manager.__file__, 1, message, (), exc_info
            logging.getLogger("absl").handle(written("absl", logging.ERROR, *place))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a mistake of another library", "a save is late"]
