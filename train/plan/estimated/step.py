"""Estimate the cost and memory of a step from shapes and shardings, without a compiler.

This takes milliseconds for each candidate of a search. `read_step` and `device_memory`
give the compiler's figures, and `benchmarks/estimates.py` compares both.
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
    StepCost,
    sent_bytes,
)
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.hbm_bytes import estimate_hbm_bytes
from train.plan.estimated.local_step import LocalStep, local_step
from train.plan.estimated.phases import Phase, phases
from train.plan.estimated.temporaries import saved_bytes, temporaries
from train.plan.memory import HELD, DeviceMemory, Figure, device_memory
from train.program import Program
from train.sharding import bytes_per_device

# The fraction of the layers' collectives that XLA overlaps with products, by runner and
# kind; other kinds, and those outside the layers, wait. Source: the schedules of
# benchmarks/estimates.py. None overlap on 3D tori (v5p), or without SparseCores (v6e).
# Transfers between TPU slices by the hosts overlap with the layer.
_BESIDE = {
    "tpu": {"all-gather": 1.0},
    "SparseCores": {"reduce-scatter": 0.7},  # small layers' gathers, too
    "gpu": {"all-gather": 0.5, "reduce-scatter": 0.5},
}
_JOINED = 30 * 2**20  # bytes that XLA's GPU compiler gathers at once, as it was seen to


def estimate_step(program: Program, step: LocalStep | None = None) -> StepCost:
    """Estimate what one device computes, moves and sends in a step.

    Args:
        program: on the devices in question.
        step: its local step, if that is known already.
    """
    step = step or local_step(program)
    state = sum(map(bytes_per_device, jax.tree.leaves(program.state)))
    outside = [e for e in step.exchanges if not e.in_layers]
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        flops=step.flops,
        hbm_bytes=estimate_hbm_bytes(step, state),
        sent=_totals(step.exchanges, program, by_use=False),
        outside_layers=_totals(outside, program, by_use=True),
        host_bytes=count_host_bytes(program, step),
        how=ESTIMATED,
    )


def count_host_bytes(program: Program, step: LocalStep | None = None) -> int:
    """Count what a step sends to host memory: activations and moments.

    As much comes back. Arguments: as `estimate_step`.
    """
    kept = saved_bytes(step or local_step(program), on_host=True)
    moments = sum(map(bytes_per_device, program.host_state.values()))
    return program.config.train.accumulation_steps * kept + moments


def estimate_memory(program: Program, step: LocalStep | None = None) -> DeviceMemory:
    """Estimate what one device needs: the state exactly, temporaries itemised.

    Arguments: as `estimate_step`.
    """
    known, step = device_memory(program), step or local_step(program)
    items, host = estimate_items(program, step), dict(known.host)
    stacked = [leaf for name, leaf in program.host_state.items() if is_of_layers(name)]
    anew = 0 if program.optimizer.in_place else sum(map(bytes_per_device, stacked))
    # One is dead when the other is made.
    if other := max(saved_bytes(step, on_host=True), anew):
        host["temporaries"] = Figure(other, ESTIMATED)
    size = sum(figure.bytes for figure in items.values())
    needed = size + sum(known.parts[name].bytes for name in HELD)
    return dataclasses.replace(
        known,
        parts=known.parts | {"temporaries": Figure(size, ESTIMATED)},
        needed=Figure(needed, ESTIMATED),
        temporaries=items,
        host=host,
    )


def estimate_items(
    program: Program, step: LocalStep | None = None
) -> dict[str, Figure]:
    """Estimate what the temporaries of a step hold. Arguments: as `estimate_step`."""
    items = temporaries(step or local_step(program))
    return {name: Figure(size, ESTIMATED) for name, size in items.items()}


def _totals(
    found: Iterable[Exchange], program: Program, by_use: bool
) -> list[CollectiveTotal]:
    def key(phase: Phase) -> tuple[tuple[str, ...], str, str, str, int]:
        e, use = phase.exchange, phase.exchange.serves if by_use else ""
        return e.axes, phase.network, e.kind, use, phase.links

    rows, device = [], program.mesh.devices.flat[0]
    platform = runner = device.platform
    if (chip := chip_of(device.device_kind)) and chip.sparse_cores:
        runner = "SparseCores" if program.config.runtime.sparse_cores else ""
    if chip and chip.links == 6:
        runner = ""
    steps = program.execution.placement.axis_steps
    every = (p for exchange in found for p in phases(exchange, program.mesh, steps))
    ordered = groupby(sorted(every, key=key), key)
    for (axes, network, kind, use, links), group in ordered:
        parts = list(group)
        of = [part.exchange for part in parts]
        payload = sum(e.payload for e in of)
        beside = _BESIDE.get(runner, {}).get(kind, 0.0)
        if network == "DCN":
            beside = 1.0
        inside = sum(e.payload for e in of if e.in_layers) / payload
        rows.append(
            CollectiveTotal(
                axes=axes,
                network=network,
                kind=kind,
                count=_starts(of, platform),
                payload=round(payload),
                sent=sum(sent_bytes(kind, p.exchange.payload, p.size) for p in parts),
                overlapped=beside * inside,
                serves=use,
                links=links,
            )
        )
    return sorted(rows, key=lambda row: -row.sent)


def _starts(found: list[Exchange], platform: str) -> int:
    """Count collectives of a kind and axes.

    XLA's GPU compiler joins what an iteration of a loop gathers, and what it scatters,
    but nothing of which one needs another's result.
    """
    if platform == "tpu" or ACTIVATION_AXES & {*found[0].axes}:
        return sum(e.count for e in found)
    iterations = defaultdict[tuple[int, int], list[float]](list)
    for e in found:
        iterations[e.body, e.count].append(e.payload / e.count)
    gathers, starts = found[0].kind == "all-gather", 0
    for (_, count), payloads in iterations.items():
        full = math.ceil(sum(payloads) / _JOINED) if gathers else 1
        starts += count * min(len(payloads), full)
    return starts
