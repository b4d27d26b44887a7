"""Find changes that make a step fit into memory.

Changes accumulate until the step fits according to the estimate from shapes. The number
of chips does not change. Only a search (plan/search) tries sharding over `tensor`.
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
from train.plan.precision import MEMORY_SAVING, Change
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
    """Return advice with the changes that make a step fit into a device's memory.

    A search needs the chips' rates; `searchable` says whether they are known.
    """
    needed, state_bytes = memory.needed.bytes, memory.held
    bottleneck = (
        f"memory: a device needs {format_bytes(needed)}, "
        f"{format_bytes(needed - budget.available)} more than is available. State and "
        f"batch take {format_bytes(state_bytes)}."
    )
    # After each change, the compiler is assumed to exceed the estimate by this much.
    beyond_estimate = needed - estimate_memory(program).needed.bytes
    proposals = [_recompute, _split_batch, _shard]
    if 2 * state_bytes > budget.available:
        proposals.insert(0, proposals.pop())
    proposals.append(partial(_shard, include_dcn=True))
    # These changes come last because they cost precision or time.
    saving_by_key = itertools.groupby(MEMORY_SAVING, lambda change: change.key)
    proposals += [partial(_save_memory, tuple(group)) for _, group in saving_by_key]
    changes = list[SuggestedChange]()
    for propose in proposals:
        candidates = [
            (beyond_estimate + estimate_memory(change.program).needed.bytes, change)
            for change in propose(program)
        ]
        fitting = (pair for pair in candidates if pair[0] <= budget.available)
        smallest = min(candidates, key=lambda pair: pair[0], default=(needed, None))
        new_needed, change = next(fitting, smallest)
        if change is None or new_needed >= needed:
            continue
        program, needed = change.program, new_needed
        fits = needed <= budget.available
        changes.append(
            SuggestedChange(change.override, change.description, needed, fits)
        )
        if fits:
            override = " ".join(change.override for change in changes)
            remedy = "make these changes; the step is then estimated to fit"
            return Advice(bottleneck, remedy, override, tuple(changes))
    change_text = "use more or larger chips, or split layers into more parts"
    if changes:
        change_text = f"the changes in the table are not enough: {change_text}"
    if not searchable:
        return Advice(bottleneck, change_text, changes=tuple(changes))
    change_text += "; a search compares layouts"
    return Advice(bottleneck, change_text, "search=true", tuple(changes))


def _shard(program: Program, include_dcn: bool = False) -> list[_Candidate]:
    """Return the change that moves devices from the data axis to fsdp.

    The data axis then spans only slices or nodes, or nothing if `include_dcn`.
    """
    config, shape = program.config, program.mesh.shape
    dcn = config.mesh.dcn
    data = 1 if include_dcn else dcn.data
    if shape["data"] == data:
        return []
    sizes = {"data": data, "fsdp": shape["fsdp"] * shape["data"] // data}
    overrides = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    if include_dcn:
        dcn = replace(dcn, data=1, fsdp=dcn.fsdp * dcn.data)
        overrides += [f"mesh.dcn.data={dcn.data}", f"mesh.dcn.fsdp={dcn.fsdp}"]
    config = replace(config, mesh=replace(config.mesh, **sizes, dcn=dcn))
    try:
        devices = list(program.mesh.devices.flat)
        program = make_program(config, devices, num_tokens=program.num_tokens)
    except ConfigError:  # this number of shards does not divide the model's dims
        return []
    description = "shard the state over more devices instead of replicating it"
    description += ", also across slices or nodes" if include_dcn else ""
    return [_Candidate(description, " ".join(overrides), program)]


def _recompute(program: Program) -> list[_Candidate]:
    """Return the changes that save fewer intermediates of each layer."""
    train = program.config.train
    return [
        _Candidate(
            "recompute more of each layer",
            f"train.remat={format_policy(policy)}",
            program.with_train_config(replace(train, remat=policy)),
        )
        for policy in policies_keeping_less(train.remat, train.offload)
    ]


def _split_batch(program: Program) -> list[_Candidate]:
    """Return the changes to 2, 4, 8, ... times as many microbatches.

    Each device keeps at least one row for each microbatch of a pipeline
    (`Pipeline.local_microbatches`).
    """
    train, inputs = program.config.train, program.batch.inputs
    rows, _ = inputs.sharding.shard_shape(inputs.shape)
    steps, candidates = train.accumulation_steps, list[_Candidate]()
    while rows % (program.pipeline.local_microbatches * (steps := 2 * steps)) == 0:
        changed = program.with_train_config(replace(train, accumulation_steps=steps))
        override = f"train.accumulation_steps={steps}"
        description = "split the batch into smaller microbatches"
        candidates.append(_Candidate(description, override, changed))
    return candidates


def _save_memory(changes: Sequence[Change], program: Program) -> list[_Candidate]:
    """Return the supported `changes` whose config key has its default value."""
    devices, candidates = list(program.mesh.devices.flat), list[_Candidate]()
    for change in changes:
        config = change.applied(program.config)
        if change.applies_to(program.config) and not config_mistakes(config):
            with suppress(ConfigError):  # unsupported on these devices
                changed = make_program(config, devices, num_tokens=program.num_tokens)
                description = f"use {change.description}"
                candidates.append(_Candidate(description, change.override, changed))
    return candidates
