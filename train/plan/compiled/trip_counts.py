"""List the instructions that a compiled program executes, and how often.

The text for CPU and GPU contains trip counts. For TPU, this module derives them from a
counter that starts at a constant, grows by a constant, and is compared with a constant.
Any other loop counts once and is listed in `Module.unread`. The model's config says how
often the branches of a conditional are taken.
"""

import math
import re
from statistics import mode

from model.config import ModelConfig
from train.plan.branches import branch_counts
from train.plan.compiled.collectives import KINDS
from train.plan.compiled.hlo import (
    Computation,
    Executed,
    Instruction,
    Loop,
    Module,
    parse,
)
from train.plan.sections import outermost_part, scope_in_name


def read_module(text: str, model: ModelConfig | None = None) -> Module:
    """Parse a module, and list its loops and executed instructions.

    Without a model, each branch of a conditional counts as always taken.

    Raises:
        ValueError: if the text is not an HLO module.
    """
    module = parse(text)
    _list_executed(module.entry, 1, (), model)
    read = {i.computation for e in module.executed for i in e.instruction.with_nested}
    for computation in module.computations.values():
        for instruction in computation.order if computation not in read else ():
            if instruction.opcode.removesuffix("-start") in KINDS:
                module.unread.append(f"{instruction.name}: in no executed instruction")
    module.executed = [executed for executed in module.executed if executed.count]
    return module


def _list_executed(
    computation: Computation,
    count: float,
    loops: tuple[Loop, ...],
    model: ModelConfig | None,
) -> None:
    """Append a computation's instructions, loops and calls to its module's lists."""
    module = computation.module
    for instruction in computation.order:
        module.executed.append(Executed(instruction, count, loops))
        if instruction.opcode == "while":
            loop = _read_loop(instruction)
            module.loops[loop.body.name] = loop
            _list_executed(loop.body, count * loop.trips, (*loops, loop), model)
        elif instruction.opcode in ("call", "conditional"):
            if not instruction.called:
                computation.module.unread.append(
                    f"{instruction.name}: runs nothing known"
                )
            counts = [count] * len(instruction.called)
            if model and instruction.opcode == "conditional":
                counts = _counts_of_branches(instruction, count, model)
            for called, executions in zip(instruction.called, counts, strict=True):
                _list_executed(called, executions, loops, model)


def _counts_of_branches(
    conditional: Instruction, count: float, model: ModelConfig
) -> list[float]:
    """Return the executions of each branch, of which the first is the false one.

    If XLA renamed a conditional, its part of the model is the one that all instructions
    in the branches share. The branches of conditionals outside the layers always count.
    """
    branches = conditional.called
    name = conditional.op_name
    names = [name, *(inner.op_name for branch in branches for inner in branch.order)]
    is_in_layers = any(scope_in_name(name).startswith("layers") for name in names)
    if len(branches) != 2 or not is_in_layers:
        return [count] * len(branches)
    parts = {outermost_part(name) for name in names} - {""}
    shared_part = parts.pop() if len(parts) == 1 else ""
    return [*branch_counts(model, outermost_part(name) or shared_part, count)]


def _read_loop(loop: Instruction) -> Loop:
    stated_trips = loop.find(r'"known_trip_count":\{"n":"(\d+)"\}')
    trips = int(stated_trips) if stated_trips else _count_trips(loop)
    if trips is None:
        unread = loop.computation.module.unread
        unread.append(f"trip count of {loop.name}: counted as 1")
        trips = 1
    # XLA may drop the name of a loop, but the names in its body still begin with it.
    # Other names come from invariants that XLA moved into the loop.
    names = [i.op_name for i in loop.body.order if "/body/" in i.op_name]
    prefix = mode(name.rpartition("/body/")[0] for name in names) if names else ""
    return Loop(loop.body, loop.op_name or prefix, trips)


def _count_trips(loop: Instruction) -> int | None:
    """Return the trips of a loop with a constant counter; None for other loops."""
    condition = loop.find(r" condition=%([\w.-]+)")
    test = loop.computation.module.computations[condition].root
    (start,) = loop.operands
    end = loop.body.root
    if test.opcode != "compare" or " direction=LT" not in test.attributes:
        return None
    counter, stop = test.operands
    if counter.opcode != "get-tuple-element" or start.opcode != "tuple":
        return None
    increment = _source(end.operands[counter.index])
    steps = [_constant(operand) for operand in increment.operands]
    first = _constant(start.operands[counter.index])
    last = _constant(stop)
    step = next(filter(None, steps), None)
    if increment.opcode != "add" or first is None or last is None or step is None:
        return None
    return max(0, math.ceil((last - first) / step))


def _source(value: Instruction) -> Instruction:
    while value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        value = value.operands[0]
    return value


def _constant(value: Instruction) -> int | None:
    """Return the value of an integer constant, or None."""
    source = _source(value)
    is_integer = re.fullmatch(r"-?\d+", source.arguments)
    return int(source.arguments) if source.opcode == "constant" and is_integer else None
