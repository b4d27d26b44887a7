"""Track a run with TensorBoard, in event files under `<run_dir>/tensorboard/`.

Each start writes a new file. Its first record tells readers to forget those steps of
earlier starts that this start repeats.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.run.trackers.writer import Line, Writer


class TensorBoardWriter(Writer):
    """Writes the lines of a start to one event file."""

    name = "tensorboard"

    def open(self, folder: Path, marked: int) -> int:
        """Begin a file; write steps after the restored one again, even if marked."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        events: Any = event_pb2  # protobuf defines their members at run time
        summaries: Any = summary_pb2
        self._event = events.Event
        self._summary = summaries.Summary
        last = min(marked, self._run.step)
        # Readers read the files in the order of their names.
        self._file = EventsWriter(str(folder / f"{self._run.start:06d}"))
        session_start = events.SessionLog(status=events.SessionLog.START)
        self._add(session_log=session_start, step=last + 1)
        self._file.flush()
        return last

    def _add(self, **fields: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), **fields))

    def write(self, lines: Sequence[Line]) -> None:
        """Write lines and flush them, so that readers see them at once."""
        for step, values in lines:
            entries = [
                self._summary.Value(tag=tag, simple_value=value)
                for tag, value in values.items()
            ]
            self._add(step=step, summary=self._summary(value=entries))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
