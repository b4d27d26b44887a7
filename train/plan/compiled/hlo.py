"""The text of an optimized HLO module, as `compiled.as_text()` gives it.

Only as much of the language as counting needs: computations, their instructions in
scheduled order, arrays, which computation calls which. A line that cannot be read is
listed in `Module.unread`, never left out silently. The text is that of a program for
TPU, GPU or CPU, as one device runs it.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEADER = re.compile(r"(ENTRY )?%(\S+) \(.*\{")
_INSTRUCTION = re.compile(r"  (ROOT )?%(\S+) = (.*)", re.DOTALL)
_OPCODE = re.compile(r" ([\w-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_END = re.compile(r"\}(, execution_thread=.*)?")
_BODY = r" body=%([\w.-]+)"
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class HloArray:
    """One array of a value. `space` is its memory; 0 is the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes without padding; 0 for tokens."""
        bits = re.search(r"\d+", self.dtype)
        width = 8 if self.dtype == "pred" else int(bits[0]) if bits else 0
        return math.ceil(math.prod(self.dims) * width / 8)


@dataclass(eq=False)
class Instruction:
    """One line of `within`: `name = arrays opcode(arguments), attributes`."""

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]  # a tuple's, nested ones too, in order
    arguments: str
    attributes: str
    computation: "Computation" = field(repr=False)

    @functools.cached_property
    def operand_names(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.-]+)", self.arguments)

    @property
    def operands(self) -> "list[Instruction]":
        """What makes the operands."""
        return [self.computation.instructions[name] for name in self.operand_names]

    @property
    def users(self) -> "list[Instruction]":
        """Who uses the result."""
        return self.computation.users.get(self.name, [])

    @functools.cached_property
    def op_name(self) -> str:
        """Where it comes from in the traced program; "" where XLA does not say."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    def find(self, pattern: str) -> str:
        """Return the group of a pattern searched in the attributes, else ""."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.find(r'custom_call_target="([^"]*)"')

    @property
    def index(self) -> int:
        """Which element a get-tuple-element takes."""
        return int(self.find(r" index=(\d+)"))

    @property
    def body(self) -> "Computation":
        """What a `while` runs."""
        return self.computation.module.computations[self.find(_BODY)]

    @property
    def loop(self) -> "Loop":
        """The loop that a `while` is, of a module that was read with its loops."""
        return self.computation.module.loops[self.body.name]

    @functools.cached_property
    def called(self) -> "list[Computation]":
        """The computations that it runs once: a fusion's, a call's, the branches."""
        names = re.findall(r" (?:calls|\w+_computation)=%([\w.-]+)", self.attributes)
        if self.opcode in ("call", "call-start"):  # on this core, or a TPU's SparseCore
            names += re.findall(r" to_apply=%([\w.-]+)", self.attributes)
        branches = self.find(r" branch_computations=\{(.*?)\}")
        names += re.findall(r"%([\w.-]+)", branches)
        return [self.computation.module.computations[name] for name in names]

    @property
    def nested(self) -> "Iterator[Instruction]":
        """What runs inside a fusion or an asynchronous wrapper, nested too."""
        for computation in self.called:
            for instruction in computation.order:
                yield instruction
                yield from instruction.nested

    @property
    def with_nested(self) -> "list[Instruction]":
        """Itself and what it holds that the program does not run on its own."""
        return [self, *(() if self.opcode in ("call", "conditional") else self.nested)]


@dataclass(eq=False)
class Computation:
    """Instructions by name, in the order in which they are scheduled."""

    name: str
    module: "Module" = field(repr=False)
    instructions: dict[str, Instruction]
    root: Instruction = field(init=False)

    @functools.cached_property
    def order(self) -> list[Instruction]:
        """The instructions as they are scheduled."""
        return list(self.instructions.values())

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who uses each result."""
        users = dict[str, list[Instruction]]()
        for instruction in self.order:
            for operand in instruction.operand_names:
                users.setdefault(operand, []).append(instruction)
        return users


@dataclass(frozen=True)
class Loop:
    """A `while` that instructions stand in."""

    body: Computation
    op_name: str  # of the loop, or the most frequent start of those in its body
    trips: int
    instruction: Instruction


@dataclass(frozen=True)
class Executed:
    """An instruction that the program runs on its own, not as part of a fusion."""

    instruction: Instruction
    times: int  # in one run of the program
    loops: tuple[Loop, ...]  # outermost first


@dataclass(eq=False)
class Module:
    """A program."""

    computations: dict[str, Computation] = field(default_factory=dict)
    entry: Computation = field(init=False)
    unread: list[str] = field(default_factory=list)  # lines, and loops' trips
    executed: list[Executed] = field(default_factory=list)
    loops: dict[str, Loop] = field(default_factory=dict)  # by their bodies' names


def parse(text: str) -> Module:
    """Read a module, without what it executes (train/plan/compiled/trip_counts.py).

    Raises:
        ValueError: if the text is not that of an HLO module.
    """
    module, header, lines = Module(), None, list[str]()
    for line in text.splitlines():
        if header is None:
            header = _HEADER.fullmatch(line)
            lines = []
        elif _END.fullmatch(line):
            computation = _computation(header[2], lines, module)
            if header[1]:
                module.entry = computation
            header = None
        elif line.startswith("  ") or not lines:
            lines.append(line)
        else:  # a kernel's metadata goes over several lines
            lines[-1] += "\n" + line
    if not hasattr(module, "entry"):
        raise ValueError("this is not the text of an HLO module: no ENTRY computation")
    return module


def _computation(name: str, lines: list[str], module: Module) -> Computation:
    computation = Computation(name, module, {})
    for line in lines:
        found = _INSTRUCTION.fullmatch(line)
        instruction = _instruction(found[2], found[3], computation) if found else None
        if not found or not instruction:
            module.unread.append(line.strip())
            continue
        computation.instructions[instruction.name] = instruction
        if found[1]:
            computation.root = instruction
    module.computations[name] = computation
    return computation


def _instruction(name: str, text: str, within: Computation) -> Instruction | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if not opcode:
        return None
    close = _closing(text, opcode.end() - 1)
    arrays = tuple(_array(*found) for found in _ARRAY.findall(text[:end]))
    arguments, attributes = text[opcode.end() : close], text[close + 1 :]
    return Instruction(name, opcode[1], arrays, arguments, attributes, within)


def _closing(text: str, start: int) -> int:
    """Find the parenthesis that closes the one at `start`; strings do not count."""
    depth = 0
    for found in re.compile(rf"{_STRING}|[()]").finditer(text, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return len(text)


def _array(dtype: str, dims: str, layout: str) -> HloArray:
    space = re.search(r"S\((\d+)\)", layout)
    sizes = (int(size.lstrip(" <=")) for size in dims.split(",") if size)
    return HloArray(dtype, tuple(sizes), int(space[1]) if space else 0)


def is_loop_invariant(body: Computation, element: int) -> bool:
    """Tell whether a loop with this body leaves an element of its state as it was."""
    if body.root.opcode != "tuple":
        return False
    made = body.root.operands[element]
    while True:
        if made.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
            (made,) = made.operands
        elif made.opcode != "get-tuple-element":
            return False
        else:
            (source,) = made.operands
            if source.opcode == "parameter":
                return made.index == element
            if source.opcode != "while" or not is_loop_invariant(
                source.body, made.index
            ):
                return False
            (start,) = source.operands
            if start.opcode != "tuple":
                return False
            made = start.operands[made.index]
