"""Label the instructions of a compiled step by scope and kind, for a profile.

Labels come from the text of the compiled step and the operation names in it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from train.plan.compiled.attribution import (
    part_in_name,
    producers,
    scope_of,
    split_name,
)
from train.plan.compiled.collectives import KINDS
from train.plan.compiled.flops import multiplies
from train.plan.compiled.hlo import Executed
from train.plan.compiled.trip_counts import read_module
from train.plan.sections import scope_in_name

WAITING = "waiting"
UNNAMED = "unnamed"
OTHER = "other programs"
_SCOPE = re.compile(r"(?:transpose\(|jvp\()*(\w+)\)*")
_NOT_SCOPES = {"shard_map", "while", "body", "cond", "closed_call", "checkpoint"}
_COPIES = {
    *("copy", "copy-start", "copy-done", "transpose", "reshape", "bitcast", "slice"),
    *("dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast"),
    *("reverse", "gather", "tuple", "get-tuple-element", "parameter", "constant"),
    "iota",
}


class Label(NamedTuple):
    """The label of an instruction.

    scope: the part of the model, such as "layers forward attention.query".
    kind: collectives, attention, products, copies or elementwise.
    """

    scope: str
    kind: str


class Labels:
    """The labels of the instructions of one compiled step."""

    def __init__(self, text: str):
        """Parse the result of `compiled.as_text()`.

        Raises:
            ValueError: if `text` is not an HLO module.
        """
        self._module = read_module(text)
        self._by_name = {
            executed.instruction.name: executed for executed in self._module.executed
        }
        self._program = text.split(maxsplit=2)[1].rstrip(",")
        self._labels = dict[str, Label | None]()

    def label(self, instruction: str, program: str) -> Label | None:
        """Return an event's label; None for a loop, whose body's events have labels."""
        if program and program.split("(")[0] != self._program:
            return Label(OTHER, OTHER)
        if instruction not in self._labels:
            executed = self._by_name.get(instruction)
            label = self._label_of(executed) if executed else Label(UNNAMED, UNNAMED)
            self._labels[instruction] = label
        return self._labels[instruction]

    def _label_of(self, executed: Executed) -> Label | None:
        instruction = executed.instruction
        if instruction.opcode == "while":
            return None
        nested = instruction.with_nested
        opcodes = {inner.opcode for inner in nested}
        if merged := split_name(instruction.op_name):  # XLA merged several operations.
            scopes = _most_common(scope_in_name(n) or _outermost(n) for n in merged)
            return Label((*scopes, UNNAMED)[0], self._kind_of(executed, "", opcodes))
        nested_scopes = (scope_of(executed, inner) for inner in nested if inner.op_name)
        stack = _first([scope_of(executed, instruction), *_most_common(nested_scopes)])
        nested_names = _most_common(inner.op_name for inner in nested)
        op_names = [instruction.op_name, *nested_names]
        part = _first(map(part_in_name, op_names))
        scope = f"{stack} {part}".strip() or _first(map(_outermost, op_names))
        if not scope:  # Use the name of an operand's producer instead.
            operand_names = (operand.op_name for operand in producers(instruction))
            part = scope = _first(map(part_in_name, operand_names))
        return Label(scope or UNNAMED, self._kind_of(executed, part, opcodes))

    def _kind_of(self, executed: Executed, part: str, opcodes: set[str]) -> str:
        if any(opcode.removesuffix("-start") in KINDS for opcode in opcodes):
            return "collectives"
        if part.split(".")[-1] == "attention":  # the kernel, without projections
            return "attention"
        if multiplies(executed.instruction):
            return "products"
        return "copies" if opcodes <= _COPIES else "elementwise"


def _first(names: Iterable[str]) -> str:
    """Return the first name that is not empty, or ""."""
    return next(filter(None, names), "")


def _most_common(names: Iterable[str]) -> list[str]:
    return [name for name, _ in Counter(filter(None, names)).most_common()]


def _outermost(name: str) -> str:
    """Return the outermost scope in a name, or "" if there is none."""
    _, *scopes, _ = name.split("/") if name.count("/") > 1 else ["", ""]
    matches = (_SCOPE.fullmatch(scope) for scope in scopes)
    names = (match[1] for match in matches if match)
    return _first(name for name in names if name not in _NOT_SCOPES)
