"""Sum the time of traced steps by scope and kind, including waiting.

The sums add up to the time from the start of the first traced step to the end of the
last, even if instructions overlap.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from train.profile.labels import WAITING, Label, Labels
from train.profile.profiler_trace import Event, read_trace, time_spent


def read_times(folder: epath.Path, text: str) -> tuple[dict[Label, float], int]:
    """Return the mean seconds of each label over devices, and the number of devices.

    `text` is the HLO text of the compiled step.

    Raises:
        ValueError: if a trace or the text cannot be read.
    """
    labels, total, devices = Labels(text), defaultdict[Label, float](float), 0
    for path in sorted(folder.glob("plugins/profile/*/*.xplane.pb")):
        with tempfile.NamedTemporaryFile(suffix=".xplane.pb") as local:
            local.write(path.read_bytes())  # The profile may be in an object store.
            local.flush()
            trace = read_trace(Path(local.name))
        for events in trace.devices.values():
            devices += 1
            for label, spent_ns in _by_label(events, trace.begin, trace.end, labels):
                total[label] += spent_ns / 1e9
    return {label: s / devices for label, s in total.items()}, devices


def _by_label(
    events: list[Event], begin: float, end: float, labels: Labels
) -> Iterator[tuple[Label, float]]:
    """Yield the labels of one device's events and their nanoseconds."""

    def label(event: Event) -> Label | None:
        return labels.label(event.instruction, event.program)

    def rank(event: Event) -> int:
        event_label = label(event)
        return event_label is not None and event_label.kind in ("collectives", "copies")

    labelled = [event for event in events if label(event) is not None]
    for event, spent_ns in time_spent(labelled, begin, end, rank).items():
        event_label = label(event) if event else None
        yield event_label or Label(WAITING, WAITING), spent_ns
