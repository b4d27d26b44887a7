"""What an instruction of a compiled step is for.

Told from the names of the traced program, which look like
`jit(train_step)/transpose(jvp(layers))/while/body/.../btd,df->btf/dot_general`: scopes
and einsums stand in model/ and train/step.py. A gathered parameter is followed back to
the argument of the step, whose name it then bears.
"""

import re
from collections import deque
from collections.abc import Iterator

from train.plan.compiled.flops import is_kernel
from train.plan.compiled.hlo import (
    BODY,
    Computation,
    Executed,
    Instruction,
    Module,
    index_of,
    is_kept,
)

OTHER = "other"
OUTER = "microbatches"  # the scope around those of layers and loss
# A weight's letters in an einsum of model/, and what it is.
_WEIGHTS = {
    "dnh": "attention.query",
    "dkh": "attention.key, value",
    "nhd": "attention.output",
    "df": "mlp.up, gate",
    "fd": "mlp.down",
    "dv": "head",
    "vd": "head",
    "lio": "muon",
    "lij": "muon",
}
_SCOPES = ("layers", "loss", "microbatches", "optimizer")
_SCOPE = re.compile(rf"[/(](transpose\()?(jvp\()?({'|'.join(_SCOPES)})(?=[/)])")
_PART = re.compile(r"[/(](norm|embedding)(?=[/)])")
RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'  # of a send and its recv
_SCALARS = 64  # bytes
_NEAR = 40  # instructions
_STEPS = 80
_FUSIONS = ("fusion", "fusion-start")
_TUPLES = ("tuple", "all-reduce", "all-gather", "reduce-scatter", "opt-barrier")
_ENDS = ("dot", "convolution", "reduce", "scatter", "gather", "iota", "constant")


def scope(executed: Executed, instruction: Instruction) -> str:
    """Say where an instruction stands: "layers forward", "loss backward", or "".

    Where the loops around it do not tell, its name does: XLA runs the first or the last
    trip of a loop outside of it, and moves what does not change from trip to trip.
    """
    name = instruction.op_name or executed.instruction.op_name
    names = [name] if name else list(near(executed))
    loops = [loop.op_name for loop in reversed(executed.loops)]
    found = [_scope(name) for name in (*loops, *names) if not _items(name)]
    inner = [place for place in found if place and place != OUTER]
    return next(iter(inner), OUTER if OUTER in found else "")


def _scope(name: str) -> str:
    found = _SCOPE.findall(name)
    if not found:
        return ""
    back, forward, what = found[-1]
    return what + (" backward" if back else " forward" if forward else "")


def serves(
    module: Module, executed: Executed, inner: Instruction, within: Computation
) -> list[tuple[str, int]]:
    """Say what the operands of a collective are, with their bytes."""
    operands = within.operands(inner)
    own = inner.op_name or executed.instruction.op_name
    each, uses = _items(own), list[tuple[str, int]]()
    if len(operands) == 1 and each:  # several arrays put behind each other (GPU)
        arrays = _concatenated(module, operands[0], within)
        if len(arrays) == len(each):
            names = [use_of(name) or OTHER for name in each]
            return [(n, a.num_bytes) for n, a in zip(names, arrays, strict=True)]
    each = each if len(each) == len(operands) else [""] * len(operands)
    for operand, name in zip(operands, each, strict=True):
        if operand.num_bytes <= _SCALARS:
            uses.append(("scalars", operand.num_bytes))
            continue
        names = list(trail(module, executed, operand, within))
        arguments = [name for name in names if "params[" in name]
        candidates = [*arguments, name, *names, own, *near(executed)]
        use = next(filter(None, map(use_of, candidates)), OTHER)
        uses.append((use, operand.num_bytes))
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


def _items(name: str) -> list[str]:
    """Take apart the name of several instructions in one, "a/(b:c)" (GPU)."""
    found = re.fullmatch(r"(.*?)\((.*:.*)\)", name)
    return [found[1] + item for item in found[2].split(":")] if found else []


def use_of(name: str) -> str:
    """Say what an instruction is for, by its name alone; "" if that does not tell."""
    argument = re.search(r"params((?:\[\\?'\w+\\?'\])+)", name)
    if argument:
        path = re.findall(r"\w+", argument[1])
        return ".".join(p for p in path if p not in ("layers", "weight", "scale"))
    for term in re.findall(r"[a-z]+", "".join(re.findall(r"[a-z,]+->[a-z]+", name))):
        if term in _WEIGHTS:
            return _WEIGHTS[term]
    part = _PART.findall(name)
    return part[-1] if part else ""


def near(executed: Executed) -> Iterator[str]:
    """Give the names of the instructions that use a result, the nearest first."""
    users = executed.computation.users
    queue, seen = deque([executed.instruction]), {executed.instruction.name}
    while queue and len(seen) < _NEAR:
        for user in users.get(queue.popleft().name, ()):
            if user.name not in seen:
                seen.add(user.name)
                queue.append(user)
                yield user.op_name


def trail(
    module: Module,
    executed: Executed,
    instruction: Instruction,
    computation: Computation,
) -> Iterator[str]:
    """Give the names on the way back to what made a value, or to the argument it is.

    Through fusions and loops, and along the largest operand; it ends at an instruction
    that sums over a dim.
    """
    loops, callers = executed.loops, list[tuple[Instruction, Computation]]()
    if computation is not executed.computation:
        callers.append((executed.instruction, executed.computation))
    seen = set[str]()
    for _ in range(_STEPS):
        yield instruction.op_name
        operands, opcode = computation.operands(instruction), instruction.opcode
        seen.add(instruction.name)
        if opcode == "parameter":
            if not callers:
                return
            fusion, computation = callers.pop()
            instruction = computation.operands(fusion)[int(instruction.arguments)]
        elif opcode in _FUSIONS:
            callers.append((instruction, computation))
            computation = module.computations[instruction.called[0]]
            instruction = computation.root
        elif opcode != "get-tuple-element":
            if opcode in _ENDS or is_kernel(instruction) or not operands:
                return
            if opcode in ("dynamic-update-slice", "dynamic-slice", "slice-start"):
                instruction = operands[opcode == "dynamic-update-slice"]
            elif opcode == "recv":
                instruction = _sent(instruction, computation)
            else:  # of a sum, not what it was in the iteration before
                new = [o for o in operands if o.name not in seen] or operands
                instruction = max(new, key=lambda operand: operand.num_bytes)
        else:
            (source,), element = operands, index_of(instruction)
            if source.opcode in _FUSIONS:
                callers.append((source, computation))
                computation = module.computations[source.called[0]]
                source = computation.root
            elif source.opcode == "while" or (
                source.opcode == "parameter" and loops and not callers
            ):
                if source.opcode == "while":
                    loop = module.loops[source.find(BODY)]
                else:
                    loop, loops = loops[-1], loops[:-1]
                if is_kept(module, loop.body, element):
                    computation = loop.within
                    (source,) = computation.operands(loop.instruction)
                else:  # made in the iteration before, or in the last one
                    loops = (*loops, loop)
                    computation = module.computations[loop.body]
                    source = computation.root
            made = computation.operands(source)
            if source.opcode not in _TUPLES or len(made) <= element:
                return
            instruction = made[element]


def _sent(recv: Instruction, computation: Computation) -> Instruction:
    """Give what this device sends to get what it receives (TPU slices)."""
    meeting = recv.find(RENDEZVOUS)
    (send,) = [
        i
        for i in computation.instructions.values()
        if i.opcode == "send" and i.find(RENDEZVOUS) == meeting
    ]
    return computation.operands(send)[0]
