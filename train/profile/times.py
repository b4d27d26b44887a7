"""Sum the time of traced steps by scope and kind, including waiting.

The sums add up to the time from the start of the first traced step to the end of the
last, even if instructions overlap.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from train.plan.compiled.labels import WAITING, Label, Labels
from train.profile.profiler_trace import Event, attribute_time, read_trace


def read_times(folder: epath.Path, hlo: str) -> tuple[dict[Label, float], int]:
    """Return the mean seconds of each label over devices, and the number of devices.

    `hlo` is the text of the compiled step.

    Raises:
        ValueError: if a trace or the HLO cannot be read.
    """
    labels = Labels(hlo)
    totals_s = defaultdict[Label, float](float)
    num_devices = 0
    for path in sorted(folder.glob("plugins/profile/*/*.xplane.pb")):
        with tempfile.NamedTemporaryFile(suffix=".xplane.pb") as local:
            local.write(path.read_bytes())  # The profile may be in an object store.
            local.flush()
            trace = read_trace(Path(local.name))
        for events in trace.devices.values():
            num_devices += 1
            for label, spent_ns in _label_times(events, trace.begin, trace.end, labels):
                totals_s[label] += spent_ns / 1e9
    return {label: s / num_devices for label, s in totals_s.items()}, num_devices


def _label_times(
    events: list[Event], begin: float, end: float, labels: Labels
) -> Iterator[tuple[Label, float]]:
    """Yield the label and the nanoseconds of each event of one device."""

    def label(event: Event) -> Label | None:
        return labels.label(event.instruction, event.program)

    def rank(event: Event) -> int:
        event_label = label(event)
        return event_label is not None and event_label.kind in ("collectives", "copies")

    labelled = [event for event in events if label(event) is not None]
    for event, spent_ns in attribute_time(labelled, begin, end, rank).items():
        event_label = label(event) if event else None
        yield event_label or Label(WAITING, WAITING), spent_ns
