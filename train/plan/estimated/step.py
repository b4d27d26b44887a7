"""Estimate the cost and memory of a step from shapes and shardings, without a compiler.

This takes milliseconds for each candidate of a search. `read_step` and `device_memory`
give the compiler's figures. `benchmarks/estimates.py` compares them with estimates.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby

import jax

from model.params import is_of_layers
from train.hardware.chips import chip_of
from train.plan.cost import (
    ACTIVATION_AXES,
    ESTIMATED,
    CollectiveTotal,
    SectionCost,
    StepCost,
    sent_bytes,
)
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.hbm_bytes import estimate_hbm_bytes
from train.plan.estimated.local_step import LocalStep, local_step
from train.plan.estimated.phases import Phase, phases
from train.plan.estimated.temporaries import saved_bytes, temporaries
from train.plan.memory import HELD, DeviceMemory, Figure, device_memory
from train.plan.sections import SECTIONS
from train.program import Program
from train.sharding import bytes_per_device

# The fraction of the layers' collectives that XLA overlaps with products, by executor
# and kind. Other kinds, and collectives outside the layers, do not overlap. Nothing
# overlaps on 3D tori (v5p), or on chips whose SparseCores are unused (v6e). Transfers
# between TPU slices are an exception: those of layers overlap on all chips. Source: the
# schedules of the steps that benchmarks/estimates.py compiles.
_OVERLAP = {
    "tpu": {"all-gather": 1.0},
    "SparseCores": {"reduce-scatter": 0.7},  # gathers too, but only in small layers
    "gpu": {"all-gather": 0.5, "reduce-scatter": 0.5},
}
_MAX_COMBINED = 30 * 2**20  # bytes that XLA:GPU combines in one gather (observed)


def estimate_step(program: Program, step: LocalStep | None = None) -> StepCost:
    """Return the estimated FLOPs, bytes and collectives of one device in a step.

    `step` is the program's `local_step`, if the caller has it already.
    """
    step = step or local_step(program)
    state = sum(map(bytes_per_device, jax.tree.leaves(program.state)))
    outside_layers = [e for e in step.exchanges if not e.in_layers]
    flops, hbm_bytes = step.flops, estimate_hbm_bytes(step, state)
    exchanges = {s: [e for e in step.exchanges if e.section == s] for s in SECTIONS}
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        sections=tuple(
            SectionCost(name, flops[name], hbm_bytes[name], _totals(sent, program))
            for name, sent in exchanges.items()
        ),
        outside_layers=_totals(outside_layers, program, by_use=True),
        host_bytes=count_host_bytes(program, step),
        how=ESTIMATED,
    )


def count_host_bytes(program: Program, step: LocalStep | None = None) -> int:
    """Return the bytes of activations and moments that a step sends to host memory.

    The same number of bytes comes back. The arguments are those of `estimate_step`.
    """
    activations = saved_bytes(step or local_step(program), on_host=True)
    moments = sum(map(bytes_per_device, program.host_state.values()))
    return program.config.train.accumulation_steps * activations + moments


def estimate_memory(program: Program, step: LocalStep | None = None) -> DeviceMemory:
    """Return the memory that one device needs: exact state, estimated temporaries.

    The arguments are those of `estimate_step`.
    """
    exact, step = device_memory(program), step or local_step(program)
    items, host = estimate_items(program, step), dict(exact.host)
    stacked = [leaf for name, leaf in program.host_state.items() if is_of_layers(name)]
    moments = 0 if program.optimizer.in_place else sum(map(bytes_per_device, stacked))
    # Saved activations are freed before new moments are made, so the larger counts.
    if peak := max(saved_bytes(step, on_host=True), moments):
        host["temporaries"] = Figure(peak, ESTIMATED)
    size = sum(figure.bytes for figure in items.values())
    needed = size + sum(exact.parts[name].bytes for name in HELD)
    return dataclasses.replace(
        exact,
        parts=exact.parts | {"temporaries": Figure(size, ESTIMATED)},
        needed=Figure(needed, ESTIMATED),
        temporaries=items,
        host=host,
    )


def estimate_items(
    program: Program, step: LocalStep | None = None
) -> dict[str, Figure]:
    """Return the items of a step's temporaries; arguments as for `estimate_step`."""
    items = temporaries(step or local_step(program))
    return {name: Figure(size, ESTIMATED) for name, size in items.items()}


def _totals(
    exchanges: Iterable[Exchange], program: Program, by_use: bool = False
) -> list[CollectiveTotal]:
    def key(phase: Phase) -> tuple[tuple[str, ...], str, str, str, int]:
        e, use = phase.exchange, phase.exchange.label if by_use else ""
        return e.axes, phase.network, e.kind, use, phase.links

    totals, device = [], program.mesh.devices.flat[0]
    platform = executor = device.platform
    if (chip := chip_of(device.device_kind)) and chip.sparse_cores:
        executor = "SparseCores" if program.config.runtime.sparse_cores else ""
    if chip and chip.links == 6:
        executor = ""
    steps = program.execution.placement.axis_steps
    all_phases = (p for e in exchanges for p in phases(e, program.mesh, steps))
    ordered = groupby(sorted(all_phases, key=key), key)
    for (axes, network, kind, use, links), group in ordered:
        group_phases = list(group)
        members = [phase.exchange for phase in group_phases]
        payload = sum(e.payload for e in members)
        sent = sum(sent_bytes(kind, p.exchange.payload, p.size) for p in group_phases)
        overlap = _OVERLAP.get(executor, {}).get(kind, 0.0)
        if network == "DCN":
            overlap = 1.0
        in_layers = sum(e.payload for e in members if e.in_layers) / payload
        totals.append(
            CollectiveTotal(
                axes=axes,
                network=network,
                kind=kind,
                count=_count_starts(members, platform),
                payload=round(payload),
                sent=sent,
                overlapped=overlap * in_layers,
                serves=use,
                links=links,
            )
        )
    return sorted(totals, key=lambda total: -total.sent)


def _count_starts(exchanges: list[Exchange], platform: str) -> int:
    """Count the executions of collectives of one kind along the same axes.

    XLA:GPU combines the gathers of one loop iteration, and also its reductions. It does
    not combine collectives of activations, because each depends on the previous one.
    """
    if platform == "tpu" or ACTIVATION_AXES & {*exchanges[0].axes}:
        return sum(e.count for e in exchanges)
    iterations = defaultdict[tuple[int, int], list[float]](list)
    for e in exchanges:
        iterations[e.body, e.count].append(e.payload / e.count)
    is_gather, starts = exchanges[0].kind == "all-gather", 0
    for (_, count), payloads in iterations.items():
        num_combined = math.ceil(sum(payloads) / _MAX_COMBINED) if is_gather else 1
        starts += count * min(len(payloads), num_combined)
    return starts
