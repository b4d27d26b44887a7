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

from train.plan.compiled.hlo import (
    BODY,
    Computation,
    Executed,
    Instruction,
    Module,
    index_of,
)

OTHER, SCALARS = "other", "scalars"
_PART = re.compile(r"[/(]part\.([\w.]+)")
_OUTER = "microbatches"  # the scope around those of layers and loss
_SCOPES = ("layers", "loss", _OUTER, "optimizer")
_SCOPE = re.compile(rf"[/(](transpose\()?(jvp\()?({'|'.join(_SCOPES)})(?=[/)])")
_SCALARS_BYTES = 64
_NEIGHBOURS = 40  # instructions
_FUSIONS = ("fusion", "fusion-start")
_TUPLES = ("tuple", "all-reduce", "all-gather", "reduce-scatter", "opt-barrier")


def scope(executed: Executed, instruction: Instruction) -> str:
    """Return where an instruction stands: "layers forward", "loss backward", or "".

    Where the loops around it do not tell, its name does: XLA runs the first or the last
    trip of a loop outside of it, and moves what does not change from trip to trip.
    """
    name = instruction.op_name or executed.instruction.op_name
    names = [name] if name else list(_user_names(executed))
    loops = [loop.op_name for loop in reversed(executed.loops)]
    scopes = [scope_of(name) for name in (*loops, *names) if not names_apart(name)]
    inner = [place for place in scopes if place and place != _OUTER]
    return next(iter(inner), _OUTER if _OUTER in scopes else "")


def scope_of(name: str) -> str:
    """Return the scope that a name tells, as `scope` does; "" if it tells none."""
    matches = _SCOPE.findall(name)
    if not matches:
        return ""
    back, forward, what = matches[-1]
    return what + (" backward" if back else " forward" if forward else "")


def part_of(name: str) -> str:
    """Return the part of the model that a name tells, `mlp.up`; "" if it tells none."""
    return ".".join(_PART.findall(name))


def serves(
    module: Module, executed: Executed, inner: Instruction, within: Computation
) -> list[tuple[str, int]]:
    """Return what the operands of a collective are for, with their bytes."""
    callers = ()
    if within is not executed.computation:
        callers = ((executed.instruction, executed.computation),)
    operands = within.operands(inner)
    own = inner.op_name or executed.instruction.op_name
    names = names_apart(own)
    if len(operands) == 1 and names:  # several arrays put behind each other (GPU)
        arrays = _concatenated(module, operands[0], within)
        if len(arrays) == len(names):
            parts = [part_of(name) or OTHER for name in names]
            return [(p, a.num_bytes) for p, a in zip(parts, arrays, strict=True)]
    uses = []
    for number, operand in enumerate(operands):
        if operand.num_bytes <= _SCALARS_BYTES:
            uses.append((SCALARS, operand.num_bytes))
            continue
        # The name of several operands is that of one of them.
        exact = own if len(operands) == 1 and not names else ""
        exact = names[number] if len(names) == len(operands) else exact
        made = _producers(module, _Value(operand, within, callers))
        before = (instruction.op_name for instruction in made)
        candidates = (exact, *before, own, *_user_names(executed))
        part = next(filter(None, map(part_of, candidates)), OTHER)
        uses.append((part, operand.num_bytes))
    return uses


def _concatenated(
    module: Module, instruction: Instruction, computation: Computation
) -> list[Instruction]:
    if instruction.opcode == "concatenate":
        return computation.operands(instruction)
    if instruction.opcode != "fusion":
        return []
    called = module.computations[instruction.called[0]]
    return _concatenated(module, called.root, called)


def names_apart(name: str) -> list[str]:
    """Take apart the name of several instructions in one, "a/(b:c)" (GPU)."""
    found = re.fullmatch(r"(|.*?/)\((.*:.*)\)", name)
    return [found[1] + item for item in found[2].split(":")] if found else []


def _user_names(executed: Executed) -> Iterator[str]:
    """Return the names of the instructions that use a result, the nearest first."""
    users = executed.computation.users
    queue, seen = deque([executed.instruction]), {executed.instruction.name}
    while queue and len(seen) < _NEIGHBOURS:
        for user in users.get(queue.popleft().name, ()):
            if user.name not in seen:
                seen.add(user.name)
                queue.append(user)
                yield user.op_name


class _Value(NamedTuple):
    """What an instruction makes, and the fusions it stands in, innermost last."""

    instruction: Instruction
    computation: Computation
    callers: tuple[tuple[Instruction, Computation], ...] = ()


def producers(
    module: Module, instruction: Instruction, within: Computation
) -> Iterator[Instruction]:
    """Return an instruction and those that make its operands, the nearest first."""
    return _producers(module, _Value(instruction, within))


def _producers(module: Module, value: _Value) -> Iterator[Instruction]:
    queue, seen = deque([value]), set[str]()
    while queue and len(seen) < _NEIGHBOURS:
        value = queue.popleft()
        if value.instruction.name not in seen:
            seen.add(value.instruction.name)
            yield value.instruction
            queue += _made_from(module, value)


def _made_from(module: Module, value: _Value) -> Iterator[_Value]:
    """Return what a value is made from, through fusions and loops."""
    instruction, computation, callers = value
    operands, opcode = computation.operands(instruction), instruction.opcode
    if opcode == "parameter" and callers:
        fusion, outer = callers[-1]
        made = outer.operands(fusion)[int(instruction.arguments)]
        yield _Value(made, outer, callers[:-1])
    elif opcode in _FUSIONS:
        called = module.computations[instruction.called[0]]
        yield _Value(called.root, called, (*callers, (instruction, computation)))
    elif opcode == "get-tuple-element":
        source, element = operands[0], index_of(instruction)
        if source.opcode in _FUSIONS:
            callers = (*callers, (source, computation))
            computation = module.computations[source.called[0]]
            source = computation.root
        elif source.opcode == "while":
            computation = module.computations[source.find(BODY)]
            source = computation.root
        elif source.opcode == "parameter":  # made in the trip before
            source = computation.root
        parts = computation.operands(source)
        if source.opcode in _TUPLES and element < len(parts):
            yield _Value(parts[element], computation, callers)
        else:
            yield _Value(source, computation, callers)
    else:
        if opcode == "dynamic-update-slice":
            operands = operands[1:2]
        for operand in operands:
            if operand.num_bytes > _SCALARS_BYTES:
                yield _Value(operand, computation, callers)
