"""Estimate the cost and memory of a step from shapes and shardings, without a compiler.

This takes milliseconds for each candidate of a search. `read_step` and `device_memory`
give the compiler's figures. `benchmarks/estimates.py` compares them with estimates.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import jax

from train.plan.cost import (
    ESTIMATED,
    CollectiveTotal,
    HbmBytes,
    SectionCost,
    StepCost,
    add_totals,
)
from train.plan.estimated.collectives import Exchange, phases
from train.plan.estimated.local_step import LocalStep, local_step
from train.plan.estimated.lower_bound import least_temporaries, saved_bytes
from train.plan.memory import LOWER_BOUND, DeviceMemory, Figure, device_memory
from train.plan.sections import OTHERS, SECTIONS
from train.program import Program
from train.sharding import bytes_per_device

_INDEXED = ("gather", "scatter-add")


def estimate_step(program: Program, step: LocalStep | None = None) -> StepCost:
    """Return the estimated FLOPs, bytes and collectives of one device in a step.

    `step` is the program's `local_step`, if the caller has it already.
    """
    step = step or local_step(program)
    outside_layers = [e for e in step.exchanges if not e.position.in_layers]
    moments = sum(map(bytes_per_device, program.host_state.values()))
    hbm_bytes, sections = _hbm_bytes(step), list[SectionCost]()
    for name in SECTIONS:
        exchanges = [e for e in step.exchanges if e.position.section == name]
        sent = _totals(exchanges, program)
        sections.append(SectionCost(name, step.flops[name], hbm_bytes[name], sent))
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        sections=tuple(sections),
        outside_layers=_totals(outside_layers, program, by_use=True),
        host_bytes=moments + step.microbatches * saved_bytes(step, on_host=True),
        how=ESTIMATED,
    )


def estimate_memory(program: Program, step: LocalStep | None = None) -> DeviceMemory:
    """Return the least memory that one device needs: state, batch and temporaries.

    `step` is the program's `local_step`, if the caller has it already.
    """
    exact, step = device_memory(program), step or local_step(program)
    sizes = least_temporaries(step)
    temporaries, host = sum(sizes.values()), dict(exact.host)
    if saved := saved_bytes(step, on_host=True):
        host["temporaries"] = Figure(saved, LOWER_BOUND)
    return dataclasses.replace(
        exact,
        parts=exact.parts | {"temporaries": Figure(temporaries, LOWER_BOUND)},
        needed=Figure(exact.held + temporaries, LOWER_BOUND),
        temporaries={name: Figure(size, LOWER_BOUND) for name, size in sizes.items()},
        host=host,
    )


def _hbm_bytes(step: LocalStep) -> defaultdict[str, HbmBytes]:
    """Estimate the main-memory traffic of one device, by section.

    The estimate has no fitted constant. It assumes that all operations between two
    products or kernels are fused into one pass over memory. So each product or kernel
    reads its operands and writes its results, and the pass before or after it moves
    each activation again, and rounds or gathers a layer's weights. XLA:TPU keeps some
    arrays in a core's own memory, so its compiled program moves less.
    """
    by_section = defaultdict[str, HbmBytes](HbmBytes)
    for op in step.operations:
        if op.work or op.name in _INDEXED:
            operands, results = {*op.operands}, {*op.results}
            passed = {a for a in operands | results if a.from_batch}
            passed |= operands if op.position.in_layers else set()
            products = sum(array.bytes for array in operands | results)
            others = sum(array.bytes for array in passed)
            count = op.position.count
            by_section[op.position.section] += HbmBytes(
                count * products, count * others
            )
    state_bytes = sum(map(bytes_per_device, jax.tree.leaves(step.program.state)))
    # The update reads the gradients, and reads and writes the state. With microbatches,
    # each gradient and the running sum are read, and the new sum is written.
    accesses = 1 + 3 * step.microbatches if step.microbatches > 1 else 1
    others = 2 * state_bytes + accesses * step.gradient_bytes
    by_section[OTHERS] += HbmBytes(others=others)
    return by_section


def _totals(
    exchanges: Iterable[Exchange], program: Program, by_use: bool = False
) -> list[CollectiveTotal]:
    """Sum exchanges by axes, network, kind and links, and optionally by use."""
    mesh, steps = program.mesh, program.execution.placement.axis_steps
    totals = [total for e in exchanges for total in phases(e, mesh, steps)]
    if not by_use:
        totals = [dataclasses.replace(total, serves="") for total in totals]
    return add_totals(totals)
