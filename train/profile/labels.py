"""What an instruction of a traced step is for, and of which kind it is.

Told by the text of the compiled step and the names in it (train/plan/compiled).
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from train.plan.compiled.attribution import (
    names_apart,
    part_of,
    producers,
    scope,
    scope_of,
)
from train.plan.compiled.collectives import KINDS
from train.plan.compiled.flops import multiplies
from train.plan.compiled.hlo import Executed
from train.plan.compiled.trip_counts import read

WAITING, UNNAMED, OTHER = "waiting", "unnamed", "other programs"
_SCOPE = re.compile(r"(?:transpose\(|jvp\()*(\w+)\)*")
_NO_SCOPES = {"shard_map", "while", "body", "cond", "closed_call", "checkpoint"}
_MOVES = {
    *("copy", "copy-start", "copy-done", "transpose", "reshape", "bitcast", "slice"),
    *("dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast"),
    *("reverse", "gather", "tuple", "get-tuple-element", "parameter", "constant"),
    "iota",
}


class Label(NamedTuple):
    """The scope, such as "layers forward attention.query", and the kind."""

    scope: str
    kind: str


class Labels:
    """Those of one compiled step."""

    def __init__(self, text: str):
        """Read `compiled.as_text()`.

        Raises:
            ValueError: it is not the text of an HLO module.
        """
        self._module = read(text)
        self._by_name = {
            executed.instruction.name: executed for executed in self._module.executed
        }
        self._program = text.split(maxsplit=2)[1].rstrip(",")
        self._known = dict[str, Label | None]()

    def label(self, instruction: str, program: str) -> Label | None:
        """Return the label of an event; None for a loop, whose body has its own."""
        if program and program.split("(")[0] != self._program:
            return Label(OTHER, OTHER)
        if instruction not in self._known:
            executed = self._by_name.get(instruction)
            known = Label(UNNAMED, UNNAMED) if executed is None else self._of(executed)
            self._known[instruction] = known
        return self._known[instruction]

    def _of(self, executed: Executed) -> Label | None:
        own = executed.instruction
        if own.opcode == "while":
            return None
        inside = own.parts
        opcodes = {inner.opcode for inner in inside}
        if several := names_apart(own.op_name):  # what most of them are for
            most = _by_count(scope_of(name) or _outermost(name) for name in several)
            return Label((*most, UNNAMED)[0], self._kind(executed, "", opcodes))
        inner_scopes = (scope(executed, inner) for inner in inside if inner.op_name)
        where = _first([scope(executed, own), *_by_count(inner_scopes)])
        names = [own.op_name, *_by_count(inner.op_name for inner in inside)]
        part = _first(map(part_of, names))
        name = f"{where} {part}".strip() or _first(map(_outermost, names))
        if not name:  # what an operand is made by tells
            made = producers(own)
            part = name = _first(part_of(each.op_name) for each in made)
        return Label(name or UNNAMED, self._kind(executed, part, opcodes))

    def _kind(self, executed: Executed, part: str, opcodes: set[str]) -> str:
        if any(opcode.removesuffix("-start") in KINDS for opcode in opcodes):
            return "collectives"
        if part.split(".")[-1] == "attention":  # without its linear layers
            return "attention"
        if multiplies(executed.instruction):
            return "products"
        return "copies" if opcodes <= _MOVES else "elementwise"


def _first(names: Iterable[str]) -> str:
    return next(filter(None, names), "")


def _by_count(names: Iterable[str]) -> list[str]:
    return [name for name, _ in Counter(filter(None, names)).most_common()]


def _outermost(name: str) -> str:
    """Return the outermost scope that a name tells, "" if it tells none."""
    _, *scopes, _ = name.split("/") if name.count("/") > 1 else ["", ""]
    found = (_SCOPE.fullmatch(each) for each in scopes)
    return _first(match[1] for match in found if match and match[1] not in _NO_SCOPES)
