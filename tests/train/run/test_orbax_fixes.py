"""Only the thousand lines of a failed save are removed from the libraries' logs."""

import logging

from absl import logging as absl_logging
from orbax.checkpoint import checkpoint_manager

from train.run.orbax_fixes import quiet_failed_saves


def test_only_the_tracebacks_of_orbax_are_removed_from_absls_log(caplog):
    quiet_failed_saves()
    make_record = logging.getLogger("absl").makeRecord
    try:
        raise OSError("no space left")
    except OSError as error:
        absl_logging.exception("a mistake of another library")
        save_error = (type(error), error, error.__traceback__)
        for message, exc_info in (
            ("a save failed", save_error),
            ("a save is late", None),
        ):
            record_fields = checkpoint_manager.__file__, 1, message, (), exc_info
            logging.getLogger("absl").handle(
                make_record("absl", logging.ERROR, *record_fields)
            )
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["a mistake of another library", "a save is late"]
