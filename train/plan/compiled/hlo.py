"""Parse the text of an optimized HLO module, as `compiled.as_text()` returns it.

The text describes the program of one TPU, GPU or CPU device. Lines that cannot be read
are listed in `Module.unread`.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

_COMPUTATION = re.compile(
    r"^(ENTRY )?%(\S+) \([^\n]*\{\n(.*?)\n\}(?:, execution_thread=[^\n]*)?$",
    re.MULTILINE | re.DOTALL,
)
_INSTRUCTION = re.compile(
    r"  (?:ROOT )?%(\S+) = (.*?) ([\w-]+)\(([^)]*)\)(.*)", re.DOTALL
)
_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_CALLED = r" (?:calls|body|branch_computations)=(%[\w.-]+|\{.*?\})"
_APPLIED = r" (?:to_apply|called_computations)=(%[\w.-]+|\{.*?\})"
# A conditional on a truth value, on GPUs. Its text has the true branch first.
_FALSE_AND_TRUE = (r" false_computation=(%[\w.-]+)", r" true_computation=(%[\w.-]+)")
_OP_NAME = r'op_name="((?:[^"\\]|\\.)*)"'


@dataclass(frozen=True)
class HloArray:
    """An array of an instruction's result. Memory space 0 is main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def num_bytes(self) -> int:
        """The size without padding; 0 for tokens."""
        bits = re.search(r"\d+", self.dtype)
        width = 8 if self.dtype == "pred" else int(bits[0]) if bits else 0
        return math.ceil(math.prod(self.dims) * width / 8)


@dataclass(eq=False)
class Instruction:
    """A line of a computation: `name = arrays opcode(arguments), attributes`."""

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]  # the elements of a tuple, flattened
    arguments: str
    attributes: str
    computation: "Computation" = field(repr=False)

    @functools.cached_property
    def operands(self) -> "list[Instruction]":
        """The instructions that produce the operands."""
        names = re.findall(r"%([\w.-]+)", self.arguments)
        return [self.computation.instructions[name] for name in names]

    @property
    def users(self) -> "list[Instruction]":
        """The instructions that use the result."""
        return self.computation.users.get(self, [])

    @functools.cached_property
    def op_name(self) -> str:
        """The scopes and primitive of the traced program, or "" if XLA dropped them."""
        return self.find(_OP_NAME)

    @property
    def num_bytes(self) -> int:
        """The size of the result, without padding."""
        return sum(array.num_bytes for array in self.arrays)

    def find(self, pattern: str) -> str:
        """Return the first group of a pattern in the attributes, or ""."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        is_call = self.opcode == "custom-call"
        return self.find(r'custom_call_target="([^"]*)"') if is_call else ""

    @property
    def index(self) -> int:
        """The element that a get-tuple-element selects."""
        return int(self.find(r" index=(\d+)"))

    @property
    def body(self) -> "Computation":
        """The body of a `while`."""
        return self.called[0]

    @property
    def loop(self) -> "Loop":
        """The loop of a `while`, after `trip_counts.read_module` has read it."""
        return self.computation.module.loops[self.body.name]

    @functools.cached_property
    def called(self) -> "list[Computation]":
        """The computations of a fusion, call or loop, or a conditional's branches.

        The false branch precedes the true one.
        """
        is_call = self.opcode in ("call", "call-start")
        patterns = (_APPLIED if is_call else _CALLED, *_FALSE_AND_TRUE)
        names = re.findall(r"%([\w.-]+)", " ".join(map(self.find, patterns)))
        return [self.computation.module.computations[name] for name in names]

    @property
    def nested(self) -> "Iterator[Instruction]":
        """All instructions inside a fusion, call, loop or conditional, depth first."""
        for computation in self.called:
            for instruction in computation.order:
                yield instruction
                yield from instruction.nested

    @property
    def with_nested(self) -> "list[Instruction]":
        """The instruction, and those that are fused into it or wrapped by it."""
        is_control_flow = self.opcode in ("call", "conditional", "while")
        return [self, *(() if is_control_flow else self.nested)]


@dataclass(eq=False)
class Computation:
    """Instructions in the order in which they are scheduled."""

    name: str
    module: "Module" = field(repr=False)
    instructions: dict[str, Instruction]  # keys are names
    root: Instruction = field(init=False)
    caller: Instruction | None = None  # the instruction that calls it

    @functools.cached_property
    def order(self) -> list[Instruction]:
        """The instructions as scheduled."""
        return list(self.instructions.values())

    def parameter(self, number: int) -> Instruction:
        """Return the parameter with a number."""
        parameters = (i for i in self.order if i.opcode == "parameter")
        return next(i for i in parameters if int(i.arguments) == number)

    @functools.cached_property
    def users(self) -> dict[Instruction, list[Instruction]]:
        """The instructions that use each result."""
        users = defaultdict[Instruction, list[Instruction]](list)
        for instruction in self.order:
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users


@dataclass(frozen=True)
class Loop:
    """A `while` loop."""

    body: Computation
    op_name: str
    trips: int


@dataclass(frozen=True)
class Executed:
    """A scheduled instruction, which is not inside a fusion."""

    instruction: Instruction
    count: float  # executions in one run of the program, on average
    loops: tuple[Loop, ...]  # outermost first


@dataclass(eq=False)
class Module:
    """A parsed program.

    unread: lines that could not be read, loops without a known trip count, and
        collectives that no executed instruction contains.
    executed, loops (by the body's name): the results of `trip_counts.read_module`.
    """

    computations: dict[str, Computation] = field(default_factory=dict)
    entry: Computation = field(init=False)
    unread: list[str] = field(default_factory=list)
    executed: list[Executed] = field(default_factory=list)
    loops: dict[str, Loop] = field(default_factory=dict)


def parse(text: str) -> Module:
    """Return a parsed module; `trip_counts.read_module` adds `executed` and `loops`."""
    module = Module()
    for is_entry, name, body in _COMPUTATION.findall(text):
        computation = module.computations[name] = Computation(name, module, {})
        if is_entry:
            module.entry = computation
        # A kernel's metadata continues in lines that are not indented.
        for line in re.split(r"\n(?=  )", body):
            if instruction := _parse_line(line, computation):
                computation.instructions[instruction.name] = instruction
                if line.startswith("  ROOT "):
                    computation.root = instruction
            else:
                module.unread.append(line.strip())
    for computation in module.computations.values():
        for instruction in computation.order:
            for called in instruction.called:
                called.caller = instruction
    if not hasattr(module, "entry"):
        raise ValueError("the text is not an HLO module: it has no ENTRY computation")
    return module


def _parse_line(line: str, computation: Computation) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, result, opcode, arguments, attributes = match.groups()
    arrays = tuple(map(_parse_array, _ARRAY.finditer(result)))
    instruction = Instruction(name, opcode, arrays, arguments, attributes, computation)
    is_update = instruction.opcode == "custom-call-update"
    return _as_call_start(instruction) if is_update else instruction


def _as_call_start(update: Instruction) -> Instruction:
    """Return the `call-start` that is equivalent to a `custom-call-update` (TPU).

    `custom-call-start()` names a computation of the SparseCores. The later
    `custom-call-update(%start, %x)` passes the operands and starts the work.
    """
    start_name, _, passed = update.arguments.partition(", ")
    start = update.computation.instructions[start_name.removeprefix("%")]
    attributes = start.attributes + update.attributes
    return replace(update, opcode="call-start", arguments=passed, attributes=attributes)


def _parse_array(match: re.Match[str]) -> HloArray:
    space = re.search(r"S\((\d+)\)", match[3] or "")
    sizes = (int(size.lstrip(" <=")) for size in match[2].split(",") if size)
    return HloArray(match[1], tuple(sizes), int(space[1]) if space else 0)
