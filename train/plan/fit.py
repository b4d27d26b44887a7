"""Find changes that make a step fit into memory.

Changes are added one after the other until the step fits according to the estimate from
shapes. More chips, and sharding layers over `tensor`, are left to the search.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from train.cli.rules import config_mistakes
from train.errors import ConfigError
from train.plan.advice import Advice, SuggestedChange
from train.plan.budget import MemoryBudget
from train.plan.estimated.step import estimate_memory
from train.plan.memory import DeviceMemory
from train.plan.precision import SMALLER, Change
from train.plan.recomputing import format_policy, policies_keeping_less
from train.program import Program, make_program
from train.units import format_bytes


class _Candidate(NamedTuple):
    description: str
    override: str
    program: Program  # the changed program


def make_fit(
    program: Program,
    memory: DeviceMemory,
    budget: MemoryBudget,
    searchable: bool = True,
) -> Advice:
    """Return the changes that make a step fit that needs more memory than a device has.

    `searchable` tells whether a search is possible: it needs the rates of the chips.
    """
    needed, state_bytes = memory.needed.bytes, memory.held
    bottleneck = (
        f"memory: a device needs {format_bytes(needed)}, "
        f"{format_bytes(needed - budget.available)} more than is available. State and "
        f"batch take {format_bytes(state_bytes)}."
    )
    # The difference between compiler and estimate is assumed not to change.
    beyond_estimate = needed - estimate_memory(program).needed.bytes
    kinds = [_recompute, _cut_batch, _shard]
    if 2 * state_bytes > budget.available:
        kinds.insert(0, kinds.pop())
    kinds.append(partial(_shard, across=True))
    # The last resort, because these changes cost precision or time.
    keys = itertools.groupby(SMALLER, lambda change: change.key)
    kinds += [partial(_make_smaller, tuple(group)) for _, group in keys]
    changes = list[SuggestedChange]()
    for kind in kinds:
        sizes = [
            (beyond_estimate + estimate_memory(change.program).needed.bytes, change)
            for change in kind(program)
        ]
        fitting = (pair for pair in sizes if pair[0] <= budget.available)
        smallest = min(sizes, key=lambda pair: pair[0], default=(needed, None))
        size, change = next(fitting, smallest)
        if change is None or size >= needed:
            continue
        program, needed = change.program, size
        fits = needed <= budget.available
        changes.append(
            SuggestedChange(change.override, change.description, needed, fits)
        )
        if fits:
            override = " ".join(change.override for change in changes)
            remedy = "make these changes; then it fits, estimated"
            return Advice(bottleneck, remedy, override, tuple(changes))
    more = "use more or larger chips, or split layers into more parts"
    if changes:
        more = f"the changes in the table are not enough: {more}"
    if not searchable:
        return Advice(bottleneck, more, changes=tuple(changes))
    more += "; a search compares layouts"
    return Advice(bottleneck, more, "search=true", tuple(changes))


def _shard(program: Program, across: bool = False) -> list[_Candidate]:
    """Shard the state over its replicas in a slice or node, or over all replicas."""
    config, shape = program.config, program.mesh.shape
    dcn = config.mesh.dcn
    copies = 1 if across else dcn.data
    if shape["data"] == copies:
        return []
    sizes = {"data": copies, "fsdp": shape["fsdp"] * shape["data"] // copies}
    overrides = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    if across:
        dcn = replace(dcn, data=1, fsdp=dcn.fsdp * dcn.data)
        overrides += [f"mesh.dcn.data={dcn.data}", f"mesh.dcn.fsdp={dcn.fsdp}"]
    config = replace(config, mesh=replace(config.mesh, **sizes, dcn=dcn))
    try:
        devices = list(program.mesh.devices.flat)
        program = make_program(config, devices, num_tokens=program.num_tokens)
    except ConfigError:  # this number of shards does not divide the model's dims
        return []
    description = "shard the state over more devices instead of replicating it"
    description += ", also across slices or nodes" if across else ""
    return [_Candidate(description, " ".join(overrides), program)]


def _recompute(program: Program) -> list[_Candidate]:
    """Save fewer intermediates of each layer."""
    train = program.config.train
    return [
        _Candidate(
            "recompute more of each layer",
            f"train.remat={format_policy(policy)}",
            program.with_train_config(replace(train, remat=policy)),
        )
        for policy in policies_keeping_less(train.remat, train.offload)
    ]


def _cut_batch(program: Program) -> list[_Candidate]:
    """Multiply the microbatches by 2, 4, 8, ..., down to one row on each device.

    A pipeline splits the rows of a microbatch further.
    """
    train, inputs = program.config.train, program.batch.inputs
    rows, _ = inputs.sharding.shard_shape(inputs.shape)
    steps, candidates = train.accumulation_steps, list[_Candidate]()
    while rows % (program.pipeline.own * (steps := 2 * steps)) == 0:
        changed = program.with_train_config(replace(train, accumulation_steps=steps))
        override = f"train.accumulation_steps={steps}"
        description = "split the batch into smaller microbatches"
        candidates.append(_Candidate(description, override, changed))
    return candidates


def _make_smaller(changes: Sequence[Change], program: Program) -> list[_Candidate]:
    """Apply changes of `precision` that are open and that these devices allow."""
    devices, candidates = list(program.mesh.devices.flat), list[_Candidate]()
    for change in changes:
        config = change.applied(program.config)
        if change.applies_to(program.config) and not config_mistakes(config):
            with suppress(ConfigError):  # unsupported on these devices
                changed = make_program(config, devices, num_tokens=program.num_tokens)
                description = f"use {change.words}"
                candidates.append(_Candidate(description, change.override, changed))
    return candidates
