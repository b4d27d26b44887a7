"""Where the time of traced steps went: by scope and kind, waiting and all.

The parts add up to the time between the first traced step's start and the last one's
end, whatever overlaps.
"""

import tempfile
from collections import defaultdict
from pathlib import Path

from etils import epath

from train.profile.labels import WAITING, Label, Labels
from train.profile.trace import Event, read_trace, time_spent


def read_times(folder: epath.Path, text: str) -> tuple[dict[Label, float], int]:
    """Return the seconds of each label, the mean of all devices, and their number.

    Args:
        folder: of the profile.
        text: of the compiled step.

    Raises:
        ValueError: a trace or the text cannot be read.
    """
    labels, total, devices = Labels(text), defaultdict[Label, float](float), 0
    for path in sorted(folder.glob("plugins/profile/*/*.xplane.pb")):
        with tempfile.NamedTemporaryFile(suffix=".xplane.pb") as local:
            local.write(path.read_bytes())  # of an object store, too
            local.flush()
            trace = read_trace(Path(local.name))
        for events in trace.devices.values():
            devices += 1
            for label, spent_ns in _of_device(events, trace.begin, trace.end, labels):
                total[label] += spent_ns / 1e9
    return {label: s / devices for label, s in total.items()}, devices


def _of_device(events: list[Event], begin: float, end: float, labels: Labels):
    def label(event: Event) -> Label | None:
        return labels.label(event.instruction, event.program)

    def rank(event: Event) -> int:
        known = label(event)
        return known is not None and known.kind in ("collectives", "copies")

    own = [event for event in events if label(event) is not None]
    for event, spent_ns in time_spent(own, begin, end, rank).items():
        waiting = Label(WAITING, WAITING)
        known = label(event) if event else waiting
        yield known or waiting, spent_ns
