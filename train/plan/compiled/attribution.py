"""What an instruction of a compiled step is for.

Told by the names that the compiler keeps of the traced program, such as
`jit(train_step)/transpose(jvp(layers))/while/body/part.mlp/part.up/dot_general`: a
part of the model (model/parts.py) inside a scope of the step. An instruction that the
compiler left without a name is for what its nearest neighbours are for.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from train.plan.compiled.hlo import Executed, Instruction

OTHER, SCALARS = "other", "scalars"
_PART = re.compile(r"[/(]part\.([\w.]+)")
_OUTER = "microbatches"  # the scope around those of layers and loss
_SCOPES = ("layers", "loss", _OUTER, "optimizer")
_SCOPE = re.compile(rf"[/(](transpose\()?(jvp\()?({'|'.join(_SCOPES)})(?=[/)])")
_SCALARS_BYTES = 64
_NEIGHBOURS = 40  # instructions
_FUSIONS = ("fusion", "fusion-start")
_TUPLES = ("tuple", "all-reduce", "all-gather", "reduce-scatter", "opt-barrier")


def scope_of(executed: Executed, instruction: Instruction) -> str:
    """Return where an instruction stands: "layers forward", "loss backward", or "".

    Where the loops around it do not tell, its name does: XLA runs the first or the last
    trip of a loop outside of it, and moves what does not change from trip to trip.
    """
    name = instruction.op_name or executed.instruction.op_name
    names = [name] if name else list(_user_names(executed))
    loops = [loop.op_name for loop in reversed(executed.loops)]
    scopes = [scope_in_name(name) for name in (*loops, *names) if not split_name(name)]
    inner = [place for place in scopes if place and place != _OUTER]
    return next(iter(inner), _OUTER if _OUTER in scopes else "")


def scope_in_name(name: str) -> str:
    """Return the scope that a name tells, as `scope` does; "" if it tells none."""
    matches = _SCOPE.findall(name)
    if not matches:
        return ""
    back, forward, what = matches[-1]
    return what + (" backward" if back else " forward" if forward else "")


def part_in_name(name: str) -> str:
    """Return the part of the model that a name tells, `mlp.up`; "" if it tells none."""
    return ".".join(_PART.findall(name))


def operand_uses(executed: Executed, inner: Instruction) -> list[tuple[str, int]]:
    """Return what the operands of a collective are for, with their bytes."""
    outer, operands = executed.instruction, inner.operands
    callers = () if inner.computation is outer.computation else (outer,)
    own = inner.op_name or outer.op_name
    names = split_name(own)
    if len(operands) == 1 and names:  # several arrays put behind each other (GPU)
        arrays = _concatenated(operands[0])
        if len(arrays) == len(names):
            parts = [part_in_name(name) or OTHER for name in names]
            return [(p, a.num_bytes) for p, a in zip(parts, arrays, strict=True)]
    uses = []
    for number, operand in enumerate(operands):
        if operand.num_bytes <= _SCALARS_BYTES:
            uses.append((SCALARS, operand.num_bytes))
            continue
        # The name of several operands is that of one of them.
        exact = own if len(operands) == 1 and not names else ""
        exact = names[number] if len(names) == len(operands) else exact
        before = (made.op_name for made in producers(operand, callers))
        candidates = (exact, *before, own, *_user_names(executed))
        part = next(filter(None, map(part_in_name, candidates)), OTHER)
        uses.append((part, operand.num_bytes))
    return uses


def _concatenated(instruction: Instruction) -> list[Instruction]:
    while instruction.opcode == "fusion":
        instruction = instruction.called[0].root
    return instruction.operands if instruction.opcode == "concatenate" else []


def split_name(name: str) -> list[str]:
    """Take apart the name of several instructions in one, "a/(b:c)" (GPU)."""
    found = re.fullmatch(r"(|.*?/)\((.*:.*)\)", name)
    return [found[1] + item for item in found[2].split(":")] if found else []


def _user_names(executed: Executed) -> Iterator[str]:
    """Return the names of the instructions that use a result, the nearest first."""
    queue, seen = deque([executed.instruction]), {executed.instruction}
    while queue and len(seen) < _NEIGHBOURS:
        for user in queue.popleft().users:
            if user not in seen:
                seen.add(user)
                queue.append(user)
                yield user.op_name


class _Value(NamedTuple):
    """What an instruction makes, and the fusions it stands in, innermost last."""

    instruction: Instruction
    callers: tuple[Instruction, ...]


def producers(
    instruction: Instruction, callers: tuple[Instruction, ...] = ()
) -> Iterator[Instruction]:
    """Return an instruction and those that make its operands, the nearest first.

    `callers` are the fusions that it stands in, innermost last.
    """
    queue, seen = deque([_Value(instruction, callers)]), set[str]()
    while queue and len(seen) < _NEIGHBOURS:
        value = queue.popleft()
        if value.instruction.name not in seen:
            seen.add(value.instruction.name)
            yield value.instruction
            queue += _made_from(value)


def _made_from(value: _Value) -> Iterator[_Value]:
    """Return what a value is made from, through fusions and loops."""
    instruction, callers = value
    operands, opcode = instruction.operands, instruction.opcode
    if opcode == "parameter" and callers:
        made = callers[-1].operands[int(instruction.arguments)]
        yield _Value(made, callers[:-1])
    elif opcode in _FUSIONS:
        yield _Value(instruction.called[0].root, (*callers, instruction))
    elif opcode == "get-tuple-element":
        source, element = operands[0], instruction.index
        if source.opcode in _FUSIONS:
            callers = (*callers, source)
            source = source.called[0].root
        elif source.opcode == "while":
            source = source.body.root
        elif source.opcode == "parameter":  # made in the trip before
            source = source.computation.root
        parts = source.operands
        if source.opcode in _TUPLES and element < len(parts):
            source = parts[element]
        yield _Value(source, callers)
    else:
        if opcode == "dynamic-update-slice":
            operands = operands[1:2]
        for operand in operands:
            if operand.num_bytes > _SCALARS_BYTES:
                yield _Value(operand, callers)
