"""Find changes that make a step fit into memory.

Changes accumulate until the step is estimated to fit. The number of chips does not
change. Only a search (plan/search) tries sharding over `tensor`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from train.cli.rules import config_mistakes
from train.config import Config
from train.errors import ConfigError
from train.plan.advice import Advice, SuggestedChange
from train.plan.budget import MemoryBudget
from train.plan.estimated.step import estimate_memory
from train.plan.memory import DeviceMemory
from train.plan.precision import MEMORY_SAVING, Change
from train.plan.recomputing import format_policy, policies_keeping_less
from train.program import Program, make_program
from train.units import format_bytes

# Overrides, what they do, and the changed config, which may be impossible.
Proposals = Iterator[tuple[str, str, Config]]


def make_fit(
    program: Program, memory: DeviceMemory, budget: MemoryBudget, *, searchable: bool
) -> Advice:
    """Return advice with the changes that make a step fit into a device's memory.

    `searchable`: whether the chips' rates are known, which a search needs.
    """
    needed, available = memory.needed.bytes, budget.available
    bottleneck = (
        f"memory: a device needs {format_bytes(needed)}, "
        f"{format_bytes(needed - available)} more than is available. State and batch "
        f"take {format_bytes(memory.held)}."
    )
    # After each change, the compiler is assumed to exceed the estimate by this much.
    gap = needed - estimate_memory(program).needed.bytes
    proposers: list[Callable[[Program], Proposals]] = [_recompute, _split_batch]
    proposers.insert(0 if 2 * memory.held > available else 2, _shard)
    # The other changes come last because they cost precision or time.
    proposers += [partial(_save_memory, changes) for changes in MEMORY_SAVING]
    changes = list[SuggestedChange]()
    for propose in proposers:
        outcomes = _outcomes(program, propose, gap, available)
        smallest = min(outcomes, key=lambda o: o[0].needed_bytes, default=None)
        if smallest is None or smallest[0].needed_bytes >= needed:
            continue
        change, program = smallest
        needed = change.needed_bytes
        changes.append(change)
        if change.fits:
            remedy = "make these changes; the step is then estimated to fit"
            override = " ".join(change.override for change in changes)
            return Advice(bottleneck, remedy, override, tuple(changes))
    remedy = "use more or larger chips, or split layers into more parts"
    override = "search=true" if searchable else ""
    return Advice(bottleneck, remedy, override, tuple(changes))


def _outcomes(
    program: Program, propose: Callable[[Program], Proposals], gap: int, available: int
) -> Iterator[tuple[SuggestedChange, Program]]:
    """Yield the possible changes and their programs, up to the first that fits."""
    devices = list(program.mesh.devices.flat)
    for override, description, config in propose(program):
        with suppress(ConfigError):
            if config_mistakes(config):
                continue
            changed = make_program(config, devices, num_tokens=program.num_tokens)
            needed = gap + estimate_memory(changed).needed.bytes
            fits = needed <= available
            yield SuggestedChange(override, description, needed, fits), changed
            if fits:
                return


def _shard(program: Program) -> Proposals:
    """Propose to move the devices within a slice or node from the data axis to fsdp."""
    mesh, shape = program.config.mesh, program.mesh.shape
    data, fsdp = mesh.dcn.data, shape["fsdp"] * shape["data"] // mesh.dcn.data
    if shape["data"] != data:
        config = replace(program.config, mesh=replace(mesh, data=data, fsdp=fsdp))
        description = "shard the state over more devices instead of replicating it"
        yield f"mesh.data={data} mesh.fsdp={fsdp}", description, config


def _recompute(program: Program) -> Proposals:
    """Propose to save fewer intermediates of each layer."""
    train = program.config.train
    for policy in policies_keeping_less(train):
        config = replace(program.config, train=replace(train, remat=policy))
        override = f"train.remat={format_policy(policy)}"
        yield override, "recompute more of each layer", config


def _split_batch(program: Program) -> Proposals:
    """Propose 2, 4, 8, ... times as many microbatches."""
    train, steps = program.config.train, program.config.train.accumulation_steps
    while (steps := 2 * steps) <= program.config.data.batch_size:
        config = replace(program.config, train=replace(train, accumulation_steps=steps))
        override = f"train.accumulation_steps={steps}"
        yield override, "split the batch into smaller microbatches", config


def _save_memory(changes: Sequence[Change], program: Program) -> Proposals:
    """Propose the changes whose config key has its default value."""
    for change in changes:
        if change.applies_to(program.config):
            config = change.applied(program.config)
            yield change.override, f"use {change.description}", config
