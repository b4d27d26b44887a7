"""Estimate the cost and memory of a step from shapes and shardings, without a compiler.

This takes milliseconds for each candidate of a search. `read_step` and `device_memory`
give the compiler's figures. `benchmarks/estimates.py` compares them with estimates.
"""

import dataclasses
from collections.abc import Iterable
from itertools import groupby

import jax

from train.plan.cost import (
    ESTIMATED,
    CollectiveTotal,
    SectionCost,
    StepCost,
    sent_bytes,
)
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.hbm_bytes import estimate_hbm_bytes
from train.plan.estimated.local_step import LocalStep, local_step
from train.plan.estimated.lower_bound import least_temporaries, saved_bytes
from train.plan.estimated.phases import Phase, phases
from train.plan.memory import LOWER_BOUND, DeviceMemory, Figure, device_memory
from train.plan.sections import SECTIONS
from train.program import Program
from train.sharding import bytes_per_device


def estimate_step(program: Program, step: LocalStep | None = None) -> StepCost:
    """Return the estimated FLOPs, bytes and collectives of one device in a step.

    `step` is the program's `local_step`, if the caller has it already.
    """
    step = step or local_step(program)
    state = sum(map(bytes_per_device, jax.tree.leaves(program.state)))
    outside_layers = [e for e in step.exchanges if not e.in_layers]
    hbm_bytes = estimate_hbm_bytes(step, state)
    exchanges = {s: [e for e in step.exchanges if e.section == s] for s in SECTIONS}
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        sections=tuple(
            SectionCost(name, step.flops[name], hbm_bytes[name], _totals(sent, program))
            for name, sent in exchanges.items()
        ),
        outside_layers=_totals(outside_layers, program, by_use=True),
        host_bytes=count_host_bytes(program, step),
        how=ESTIMATED,
    )


def count_host_bytes(program: Program, step: LocalStep) -> int:
    """Return the bytes of activations and moments that a step sends to host memory.

    The same number of bytes comes back.
    """
    moments = sum(map(bytes_per_device, program.host_state.values()))
    return step.microbatches * saved_bytes(step, on_host=True) + moments


def estimate_memory(program: Program, step: LocalStep | None = None) -> DeviceMemory:
    """Return the least memory that one device needs: state, batch and temporaries.

    `step` is the program's `local_step`, if the caller has it already.
    """
    exact, step = device_memory(program), step or local_step(program)
    items = {
        name: Figure(size, LOWER_BOUND)
        for name, size in least_temporaries(step).items()
    }
    temporaries = sum(figure.bytes for figure in items.values())
    host = dict(exact.host)
    if saved := saved_bytes(step, on_host=True):
        host["temporaries"] = Figure(saved, LOWER_BOUND)
    return dataclasses.replace(
        exact,
        parts=exact.parts | {"temporaries": Figure(temporaries, LOWER_BOUND)},
        needed=Figure(exact.held + temporaries, LOWER_BOUND),
        temporaries=items,
        host=host,
    )


def _totals(
    exchanges: Iterable[Exchange], program: Program, by_use: bool = False
) -> list[CollectiveTotal]:
    """Sum exchanges by axes, network, kind and links, and optionally by use.

    No schedule is known. On TPUs, all collectives in layers, and between slices, count
    as overlapped with products. On GPUs none do (plan/roofline.py).
    """

    def key(phase: Phase) -> tuple[tuple[str, ...], str, str, str, int]:
        e, use = phase.exchange, phase.exchange.label if by_use else ""
        return e.axes, phase.network, e.kind, use, phase.links

    totals, on_tpu = [], program.mesh.devices.flat[0].platform == "tpu"
    steps = program.execution.placement.axis_steps
    all_phases = (p for e in exchanges for p in phases(e, program.mesh, steps))
    ordered = groupby(sorted(all_phases, key=key), key)
    for (axes, network, kind, use, links), group in ordered:
        sizes = [(phase.exchange, phase.size) for phase in group]
        payload = sum(e.payload for e, _ in sizes)
        in_layers = sum(e.payload for e, _ in sizes if e.in_layers) / payload
        totals.append(
            CollectiveTotal(
                axes=axes,
                network=network,
                kind=kind,
                count=sum(e.count for e, _ in sizes),
                payload=round(payload),
                sent=sum(sent_bytes(kind, e.payload, size) for e, size in sizes),
                overlapped=in_layers if on_tpu else 0.0,
                serves=use,
                links=links,
            )
        )
    return sorted(totals, key=lambda total: -total.sent)
