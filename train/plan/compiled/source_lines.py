"""Describe the instructions of a compiled step by scope, part and source lines.

XLA's text ends with tables of stack frames and their callers, and an instruction refers
to a frame. Only frames in this repository are shown, the innermost frame of each file:
`model/linear.py:56 < model/layers.py:190`.
"""

import re
from pathlib import Path

from train.plan.compiled.attribution import part_in_name, producers, scope_of
from train.plan.compiled.hlo import Executed, Instruction

ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("model", "train", "data"))
_FILE = re.compile(r'^(\d+) "(/.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)
_MAX_FILES = 2  # files shown for each instruction


class SourceLines:
    """The stack frames of a program; empty if its text has no tables."""

    def __init__(self, text: str):
        """Read the tables at the end of an optimized module's text."""
        files = dict(_FILE.findall(text))
        self._locations = {
            location: (files.get(file, ""), line)
            for location, file, line in _LOCATION.findall(text)
        }
        frames = _FRAME.findall(text)
        # XLA of jax 0.10 adds one to each caller's number. The first frame has no
        # caller, so its number is what XLA added.
        offset = int(frames[0][2] or 0) if frames else 0
        self._frames = {
            int(frame): (location, int(caller or 0) - offset)
            for frame, location, caller in frames
        }

    def describe(self, executed: Executed) -> str:
        """Return the scope, the part of the model and the lines of an instruction.

        An instruction without them is described by the nearest producer of its operands
        that has them, or by its name.
        """
        instruction, part, line = executed.instruction, "", ""
        for producer in producers(instruction):
            line = line or self.line_of(producer)
            if part := part_in_name(producer.op_name):
                line = self.line_of(producer) or line
                break
        scope = scope_of(executed, instruction)
        place_in_step = scope if part in scope else f"{scope} {part}".strip()
        return ", ".join(filter(None, (place_in_step, line))) or instruction.name

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
