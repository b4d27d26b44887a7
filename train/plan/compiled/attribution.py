"""Find the part of the model that an instruction of a compiled step belongs to.

The compiler keeps names of the traced program. The name
`jit(train_step)/transpose(jvp(layers))/while/body/part.mlp/part.up/dot_general` has the
scope `layers` of the step and the part `mlp.up` of the model (model/scopes.py). An
instruction without a name is attributed through its nearest neighbours.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from train.plan.compiled.hlo import Executed, Instruction
from train.plan.sections import ENCLOSING, scope_in_name

OTHER = "other"
SCALARS = "scalars"
_PART = re.compile(r"[/(]part\.([\w.]+)")
_SCALARS_BYTES = 64  # arrays up to this size count as scalars
_MAX_VISITED = 40  # instructions in a search through neighbours
_FUSIONS = ("fusion", "fusion-start")
_BRANCHING = ("conditional", "while")
_TUPLES = ("tuple", "all-reduce", "all-gather", "reduce-scatter", "opt-barrier")


def scope_of(executed: Executed, instruction: Instruction) -> str:
    """Return the scope of an instruction: "layers forward", "loss backward", or "".

    The names of the enclosing loops decide first. The instruction's own name decides
    for peeled trips and invariants, which XLA moves out of loops.
    """
    own_name = _own_name(executed, instruction)
    loops = [loop.op_name for loop in reversed(executed.loops)]
    names = [*loops, *([own_name] if own_name else _user_names(executed))]
    scopes = filter(None, map(scope_in_name, names))
    return min(scopes, key=lambda scope: scope.startswith(ENCLOSING), default="")


def _own_name(executed: Executed, instruction: Instruction) -> str:
    """Return the name of an instruction, or of the executed one around it, or "".

    XLA:TPU copies a computation of its SparseCores with the names for equal arrays, so
    that only the call names the array.
    """
    outer = executed.instruction
    if outer.opcode == "call-start":
        return outer.op_name or instruction.op_name
    return instruction.op_name or outer.op_name


def part_in_name(name: str) -> str:
    """Return the part of the model in a name, for example `mlp.up`, or ""."""
    return ".".join(_PART.findall(name))


def first_part(names: Iterable[str]) -> str:
    """Return the part of the model in the first name that has one, or ""."""
    return next(filter(None, map(part_in_name, names)), "")


def operand_uses(executed: Executed, inner: Instruction) -> list[tuple[str, int]]:
    """Return the part of the model and the bytes of each operand of a collective."""
    operands = [operand for operand in inner.operands if operand.num_bytes]
    uses = []
    for operand in operands:
        names = [producer.op_name for producer in producers(operand)]
        # A collective of several arrays may have the name of only one of them.
        names.insert(len(names) if len(operands) > 1 else 0, _own_name(executed, inner))
        part = first_part([*names, *_user_names(executed)]) or OTHER
        is_scalar = operand.num_bytes <= _SCALARS_BYTES
        uses.append((SCALARS if is_scalar else part, operand.num_bytes))
    return uses


def split_name(name: str) -> list[str]:
    """Split the joint name of several instructions, "a/(b:c)" (GPU); [] otherwise."""
    match = re.fullmatch(r"(|.*?/)\((.*:.*)\)", name)
    return [match[1] + item for item in match[2].split(":")] if match else []


def _user_names(executed: Executed) -> Iterator[str]:
    """Yield the names of the instructions that use a result, the nearest first."""
    users = _nearest(executed.instruction, lambda instruction: instruction.users)
    return (user.op_name for user in users)


def producers(instruction: Instruction) -> Iterator[Instruction]:
    """Yield an instruction and those that produce its operands, the nearest first."""
    return _nearest(instruction, _sources)


def _nearest(
    instruction: Instruction, neighbours: Callable[[Instruction], list[Instruction]]
) -> Iterator[Instruction]:
    queue = deque([instruction])
    visited = set[Instruction]()
    while queue and len(visited) < _MAX_VISITED:
        value = queue.popleft()
        if value not in visited:
            visited.add(value)
            yield value
            queue += neighbours(value)


def _sources(value: Instruction) -> list[Instruction]:
    """Return the values that a value is computed from, through fusions and loops."""
    operands = value.operands
    caller = value.computation.caller
    if value.opcode == "parameter" and caller and caller.opcode not in _BRANCHING:
        return [caller.operands[int(value.arguments)]]
    if value.opcode in _FUSIONS:
        return [value.called[0].root]
    if value.opcode == "get-tuple-element":
        (source,) = operands
        if source.opcode in (*_FUSIONS, "while"):
            source = source.called[0].root
        elif source.opcode == "parameter":  # The loop's previous trip produced it.
            source = source.computation.root
        is_tuple = source.opcode in _TUPLES and value.index < len(source.operands)
        return [source.operands[value.index] if is_tuple else source]
    return [operand for operand in operands if operand.num_bytes > _SCALARS_BYTES]
