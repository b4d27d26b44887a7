"""Which line of this program's source an instruction of a compiled step comes from.

XLA's text ends in tables of stack frames, each with its caller; an instruction names
one. Of a frame's callers those in this source count, of each file the innermost:
`model/linear.py:56 < model/layers.py:190`.
"""

import re
from pathlib import Path

from train.plan.compiled.hlo import Instruction

ROOT = Path(__file__).resolve().parents[3]
_ROOMS = tuple(f"{ROOT}/{room}/" for room in ("model", "train", "data"))
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)
_SHOWN = 2  # files


class SourceLines:
    """The stack frames of a program; none where its text has no tables."""

    def __init__(self, text: str):
        """Read the tables of an optimized module's text."""
        files = dict(_FILE.findall(_table(text, "FileNames")))
        places = _LOCATION.findall(_table(text, "FileLocations"))
        self._places = {
            number: (files.get(file, ""), line) for number, file, line in places
        }
        frames = _FRAME.findall(_table(text, "StackFrames"))
        # XLA of jax 0.10 writes each caller's number plus one; the first has none.
        more = int(frames[0][2] or 0) if frames else 0
        self._frames = dict[int, tuple[str, int]]()
        for number, location, caller in frames:
            parent = int(caller or 0) - more
            self._frames[int(number)] = location, parent if parent < int(number) else 0

    def line_of(self, instruction: Instruction) -> str:
        """Return the lines an instruction comes from, innermost first; or ""."""
        frame, locations = int(instruction.find(r" stack_frame_id=(\d+)") or 0), {}
        while frame in self._frames:
            location, frame = self._frames[frame]
            file, line = self._places.get(location, ("", ""))
            if file.startswith(_ROOMS):
                locations.setdefault(file.removeprefix(f"{ROOT}/"), line)
        lines = [f"{file}:{line}" for file, line in locations.items()]
        return " < ".join(lines[:_SHOWN])


def _table(text: str, title: str) -> str:
    match = re.search(rf"^{title}\n((?:\d.*\n?)*)", text, re.MULTILINE)
    return match[1] if match else ""
