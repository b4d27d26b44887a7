"""What makes a step fit that does not: the changes it takes, and what each brings.

Changes are put on top of each other until the step fits, by the estimate from shapes.
More chips, or cutting layers over `tensor`, is left to the search.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from train.cli.rules import validate
from train.errors import ConfigError
from train.plan.advice import Advice, SuggestedChange
from train.plan.budget import MemoryBudget
from train.plan.estimated.step import estimate_memory
from train.plan.memory import DeviceMemory
from train.plan.precision import SMALLER, Change
from train.plan.recomputing import format_policy, policies_keeping_less
from train.program import Program, make_program
from train.units import format_bytes


class _Try(NamedTuple):
    words: str
    override: str  # to type
    program: Program  # what comes of it


def make_fit(
    program: Program,
    memory: DeviceMemory,
    budget: MemoryBudget,
    searchable: bool = True,
) -> Advice:
    """Return what makes a step fit that needs more memory than a device has.

    `searchable`: a search could find more; it compares speeds, which must be known.
    """
    needed, held = memory.needed.bytes, memory.held
    what = (
        f"memory: {format_bytes(needed)} a device are needed, "
        f"{format_bytes(needed - budget.available)} more than there are. State and "
        f"batch take {format_bytes(held)}."
    )
    # What the compiler found beyond the estimate is taken to stay.
    beyond = needed - estimate_memory(program).needed.bytes
    kinds = [_recompute, _cut_batch, _shard]
    if 2 * held > budget.available:
        kinds.insert(0, kinds.pop())
    kinds.append(partial(_shard, across=True))
    # They cost precision, or are slow: where nothing else does it.
    keys = itertools.groupby(SMALLER, lambda change: change.key)
    kinds += [partial(_make_smaller, tuple(changes)) for _, changes in keys]
    made = list[SuggestedChange]()
    for kind in kinds:
        sizes = [
            (beyond + estimate_memory(change.program).needed.bytes, change)
            for change in kind(program)
        ]
        fitting = (pair for pair in sizes if pair[0] <= budget.available)
        least = min(sizes, key=lambda pair: pair[0], default=(needed, None))
        size, change = next(fitting, least)
        if change is None or size >= needed:
            continue
        program, needed = change.program, size
        fits = needed <= budget.available
        made.append(SuggestedChange(change.override, change.words, needed, fits))
        if fits:
            override = " ".join(one.override for one in made)
            return Advice(what, "with this it fits, estimated", override, tuple(made))
    more = "take more or larger chips, or cut layers into more parts"
    if made:
        more = f"the changes in the table are not enough: {more}"
    if not searchable:
        return Advice(what, more, changes=tuple(made))
    return Advice(what, f"{more}; a search finds out", "search=true", tuple(made))


def _shard(program: Program, across: bool = False) -> list[_Try]:
    """Shard the state over devices that hold copies: of a slice or node, or of all."""
    config, shape = program.config, program.mesh.shape
    dcn = config.mesh.dcn
    copies = 1 if across else dcn.data
    if shape["data"] == copies:
        return []
    sizes = {"data": copies, "fsdp": shape["fsdp"] * shape["data"] // copies}
    typed = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    if across:
        dcn = replace(dcn, data=1, fsdp=dcn.fsdp * dcn.data)
        typed += [f"mesh.dcn.data={dcn.data}", f"mesh.dcn.fsdp={dcn.fsdp}"]
    config = replace(config, mesh=replace(config.mesh, **sizes, dcn=dcn))
    try:
        devices = list(program.mesh.devices.flat)
        program = make_program(config, devices, num_tokens=program.num_tokens)
    except ConfigError:  # so many do not divide the model's dims
        return []
    words = "shard the state over more devices instead of copying it"
    words += ", those of other slices or nodes too" if across else ""
    return [_Try(words, " ".join(typed), program)]


def _recompute(program: Program) -> list[_Try]:
    """Keep less of each layer, down to nothing."""
    train, found = program.config.train, list[_Try]()
    for way in policies_keeping_less(train.remat, train.offload):
        changed = program.trained(replace(train, remat=way))
        words, override = (
            "recompute more of each layer",
            f"train.remat={format_policy(way)}",
        )
        found.append(_Try(words, override, changed))
    return found


def _cut_batch(program: Program) -> list[_Try]:
    """Give 2, 4, 8, ... times the microbatches, down to a row of each a device.

    A pipeline cuts a device's rows of each once more.
    """
    train, inputs = program.config.train, program.batch.inputs
    rows, _ = inputs.sharding.shard_shape(inputs.shape)
    steps, passes = train.accumulation_steps, program.pipeline.own
    found = list[_Try]()
    while rows % (passes * (steps := 2 * steps)) == 0:
        changed = program.trained(replace(train, accumulation_steps=steps))
        override = f"train.accumulation_steps={steps}"
        words = "cut the batch into smaller microbatches"
        found.append(_Try(words, override, changed))
    return found


def _make_smaller(changes: Sequence[Change], program: Program) -> list[_Try]:
    """Keep something in fewer bits or in host memory, where it is not and can be."""
    devices, found = list(program.mesh.devices.flat), list[_Try]()
    for change in changes:
        config = change.applied(program.config)
        if change.is_open(program.config) and not validate(config):
            with suppress(ConfigError):  # these devices cannot
                changed = make_program(config, devices, num_tokens=program.num_tokens)
                found.append(_Try(f"have {change.words}", change.override, changed))
    return found
