"""Find changes that make a step fit into memory.

Changes accumulate until the step is estimated to fit. The number of chips does not
change. Only a search (plan/search) tries sharding over `tensor`.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import reduce

from train.cli.rules import config_mistakes
from train.errors import ConfigError
from train.plan.advice import Advice, SuggestedChange
from train.plan.budget import MemoryBudget
from train.plan.estimated.step import estimate_memory
from train.plan.memory import DeviceMemory
from train.plan.precision import MEMORY_SAVING, Change
from train.plan.recomputing import policies_keeping_less
from train.resolve.program import ConfiguredProgram, make_program
from train.units import format_bytes

# Changes that are made together, such as those of two mesh axes.
Proposal = list[Change]


def make_fit(
    program: ConfiguredProgram,
    memory: DeviceMemory,
    budget: MemoryBudget,
    *,
    searchable: bool,
) -> Advice:
    """Return advice with the changes that make a step fit into a device's memory.

    `searchable`: whether the chips' rates are known, which a search needs.
    """
    needed = memory.needed.bytes
    available = budget.available
    bottleneck = (
        f"memory: a device needs {format_bytes(needed)}, "
        f"{format_bytes(needed - available)} more than is available. State and batch "
        f"take {format_bytes(memory.held)}."
    )
    # After each change, the compiler is assumed to exceed the estimate by this much.
    gap = needed - estimate_memory(program).needed.bytes
    changes = list[SuggestedChange]()
    for proposals in _proposals(program):
        outcomes = _outcomes(program, proposals, gap, available)
        least = min(outcomes, key=lambda o: o[0].needed_bytes, default=None)
        if least is None or least[0].needed_bytes >= needed:
            continue
        change, program = least
        needed = change.needed_bytes
        changes.append(change)
        if change.fits:
            remedy = "make these changes; the step is then estimated to fit"
            override = " ".join(change.override for change in changes)
            return Advice(bottleneck, remedy, override, tuple(changes))
    remedy = "use more or larger chips, or split layers into more parts"
    override = "search=true" if searchable else ""
    return Advice(bottleneck, remedy, override, tuple(changes))


def _proposals(program: ConfiguredProgram) -> list[list[Proposal]]:
    """Return the alternatives of each setting, in the order in which they are tried."""
    config = program.config
    shape = program.mesh.shape
    train = config.train
    data = config.mesh.dcn.data
    # The devices within a slice or node move from the data axis to fsdp.
    fsdp = shape["fsdp"] * shape["data"] // data
    more = "shard the state further"
    shard = [Change("mesh", "data", data, more), Change("mesh", "fsdp", fsdp, more)]
    recompute = [
        [Change("train", "remat", policy, "recompute more of each layer")]
        for policy in policies_keeping_less(config.model, train)
    ]
    split = []
    steps = 2 * train.accumulation_steps
    while steps <= config.data.batch_size:
        description = "split the batch into smaller microbatches"
        split.append([Change("train", "accumulation_steps", steps, description)])
        steps *= 2
    # These changes come last because they cost precision or time.
    saving = [[[c] for c in group if c.applies_to(config)] for group in MEMORY_SAVING]
    return [[shard] if shape["data"] != data else [], recompute, split, *saving]


def _outcomes(
    program: ConfiguredProgram, proposals: list[Proposal], gap: int, available: int
) -> Iterator[tuple[SuggestedChange, ConfiguredProgram]]:
    """Yield the possible changes and their programs, up to the first that fits."""
    devices = list(program.mesh.devices.flat)
    for changes in proposals:
        config = reduce(lambda config, c: c.applied(config), changes, program.config)
        with suppress(ConfigError):
            if config_mistakes(config):
                continue
            changed = make_program(config, devices, num_tokens=program.num_tokens)
            needed = gap + estimate_memory(changed).needed.bytes
            override = " ".join(change.override for change in changes)
            fits = needed <= available
            description = changes[0].description
            yield SuggestedChange(override, description, needed, fits), changed
            if fits:
                return
