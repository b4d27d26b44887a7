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
BODY = r" body=%([\w.-]+)"
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Array:
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


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line: `name = arrays opcode(arguments), attributes`."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # a tuple's, nested ones too, in order
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.-]+)", self.arguments)

    @property
    def op_name(self) -> str:
        """Where it comes from in the traced program; "" where XLA does not say."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    def find(self, pattern: str) -> str:
        """Give the group of a pattern searched in the attributes, else ""."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """The computations that it runs once: a fusion's, a call's, the branches."""
        one = re.findall(r" (?:calls|\w+_computation)=%([\w.-]+)", self.attributes)
        if self.opcode == "call":
            one += re.findall(r" to_apply=%([\w.-]+)", self.attributes)
        return one + re.findall(
            r"%([\w.-]+)", self.find(r" branch_computations=\{(.*?)\}")
        )


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions by name, in the order in which they are scheduled."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def operands(self, of: Instruction) -> list[Instruction]:
        """Give the instructions that make the operands."""
        return [self.instructions[name] for name in of.operands]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who uses each result."""
        users = dict[str, list[Instruction]]()
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return users


@dataclass(frozen=True)
class Loop:
    """A `while` that instructions stand in."""

    body: str
    op_name: str  # of the loop, or the most frequent start of those in its body
    trips: int
    instruction: Instruction
    within: Computation  # where it stands


@dataclass(frozen=True)
class Executed:
    """An instruction that the program runs on its own, not as part of a fusion."""

    instruction: Instruction
    computation: Computation
    times: int  # in one run of the program
    loops: tuple[Loop, ...]  # outermost first


@dataclass
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: Computation
    unread: list[str]  # lines and loops that could not be read
    executed: list[Executed] = field(default_factory=list)
    loops: dict[str, Loop] = field(default_factory=dict)  # by body

    def inside(self, of: Instruction) -> Iterator[tuple[Instruction, Computation]]:
        """Give what runs inside a fusion or an asynchronous wrapper, nested too."""
        for name in of.called:
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                yield instruction, computation
                yield from self.inside(instruction)


def parse(text: str) -> Module:
    """Read a module, without what it executes (train/plan/compiled/trip_counts.py).

    Raises:
        ValueError: if the text is not that of an HLO module.
    """
    computations, unread = dict[str, Computation](), list[str]()
    entry, header, lines = None, None, list[str]()
    for line in text.splitlines():
        if header is None:
            header = _HEADER.fullmatch(line)
            lines = []
        elif _END.fullmatch(line):
            computation = _computation(header[2], lines, unread)
            computations[computation.name] = computation
            entry, header = computation if header[1] else entry, None
        elif line.startswith("  ") or not lines:
            lines.append(line)
        else:  # a kernel's metadata goes over several lines
            lines[-1] += "\n" + line
    if entry is None:
        raise ValueError("this is not the text of an HLO module: no ENTRY computation")
    return Module(computations, entry, unread)


def _computation(name: str, lines: list[str], unread: list[str]) -> Computation:
    instructions, root = dict[str, Instruction](), None
    for line in lines:
        found = _INSTRUCTION.fullmatch(line)
        instruction = _instruction(found[2], found[3]) if found else None
        if not found or not instruction:
            unread.append(line.strip())
            continue
        instructions[instruction.name] = instruction
        if found[1]:
            root = instruction
    assert root is not None, f"{name} has no ROOT"
    return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction | None:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if not opcode:
        return None
    close = _closing(text, opcode.end() - 1)
    return Instruction(
        name,
        opcode[1],
        tuple(_array(*found) for found in _ARRAY.findall(text[:end])),
        text[opcode.end() : close],
        text[close + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Find the parenthesis that closes the one at `start`; strings do not count."""
    depth = 0
    for found in re.compile(rf"{_STRING}|[()]").finditer(text, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return len(text)


def _array(dtype: str, dims: str, layout: str) -> Array:
    space = re.search(r"S\((\d+)\)", layout)
    sizes = (int(size.lstrip(" <=")) for size in dims.split(",") if size)
    return Array(dtype, tuple(sizes), int(space[1]) if space else 0)


def is_kept(module: Module, body: str, element: int) -> bool:
    """Say whether a loop with this body leaves an element of its state as it was."""
    computation = module.computations[body]
    if computation.root.opcode != "tuple":
        return False
    made = computation.operands(computation.root)[element]
    while True:
        if made.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
            (made,) = computation.operands(made)
        elif made.opcode != "get-tuple-element":
            return False
        else:
            (source,) = computation.operands(made)
            if source.opcode == "parameter":
                return index_of(made) == element
            inner = source.find(BODY)
            if source.opcode != "while" or not is_kept(module, inner, index_of(made)):
                return False
            (start,) = computation.operands(source)
            if start.opcode != "tuple":
                return False
            made = computation.operands(start)[index_of(made)]


def index_of(instruction: Instruction) -> int:
    """Give which element a get-tuple-element takes."""
    return int(instruction.find(r" index=(\d+)"))
