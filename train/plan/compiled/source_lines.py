"""Find the source lines that an instruction of a compiled step comes from.

XLA's text ends with tables of stack frames and their callers, and an instruction refers
to a frame. Only frames in this repository are shown, the innermost frame of each file:
`model/linear.py:56 < model/layers.py:190`.
"""

import re
from pathlib import Path

from train.plan.compiled.hlo import Instruction

ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("model", "train", "data"))
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)
_MAX_FILES = 2  # files shown for each instruction


class SourceLines:
    """The stack frames of a program; empty if its text has no tables."""

    def __init__(self, text: str):
        """Read the tables at the end of an optimized module's text."""
        files = dict(_FILE.findall(_table(text, "FileNames")))
        locations = _LOCATION.findall(_table(text, "FileLocations"))
        self._locations = {
            location: (files.get(file, ""), line) for location, file, line in locations
        }
        frames = _FRAME.findall(_table(text, "StackFrames"))
        # XLA of jax 0.10 adds one to each caller's number. The first frame has no
        # caller, so its number is what XLA added.
        offset = int(frames[0][2] or 0) if frames else 0
        self._frames = dict[int, tuple[str, int]]()
        for frame, location, caller in frames:
            parent = int(caller or 0) - offset
            self._frames[int(frame)] = location, parent if parent < int(frame) else 0

    def line_of(self, instruction: Instruction) -> str:
        """Return the lines that an instruction comes from, innermost first, or ""."""
        frame = int(instruction.find(r" stack_frame_id=(\d+)") or 0)
        lines = dict[str, str]()
        while frame in self._frames:
            location, frame = self._frames[frame]
            file, line = self._locations.get(location, ("", ""))
            if file.startswith(_PACKAGES):
                lines.setdefault(file.removeprefix(f"{ROOT}/"), line)
        locations = [f"{file}:{line}" for file, line in lines.items()]
        return " < ".join(locations[:_MAX_FILES])


def _table(text: str, title: str) -> str:
    match = re.search(rf"^{title}\n((?:\d.*\n?)*)", text, re.MULTILINE)
    return match[1] if match else ""
