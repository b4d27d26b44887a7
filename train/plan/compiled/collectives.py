"""List the collectives of a compiled step, with networks and mesh axes.

Each execution of a collective counts once, in every form that XLA emits: one
instruction, a start and a done, several fusions (TPU), or transfers by the hosts
between TPU slices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from model.parts.experts.exchange import CAPACITY_FACTOR
from train.hardware.interconnect import Group
from train.plan.compiled.attribution import operand_uses, scope_of
from train.plan.compiled.flops import multiplies
from train.plan.compiled.hlo import Executed, Instruction, Module
from train.plan.compiled.replica_groups import group_of, slices_group
from train.plan.cost import CollectiveTotal, add_totals, sent_bytes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("ragged-all-to-all", "collective-permute", "collective-broadcast"),
)
_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'  # shared by a send and a recv
_CHAIN = r'chain_id="(\d+)"'  # shared by the fusions that a collective is split over
_ONE_WAY = r"(UniDirection\w*Strategy\w*\{colors|RING_TYPE_UNIDIR)"
_TRANSFER_KIND = r'_xla_megascale_transfer_type="(\w+)"'
_HOST_TRANSFER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'


@dataclass(frozen=True)
class Collective:
    """A collective of a program; bytes are those of one execution.

    count: executions in one run of the program.
    payload, sent: bytes as defined in train/plan/cost.py.
    scope: the scope in the step, for example "layers backward"; may be "".
    uses: the parts of the model that use the result, with their bytes of `payload`.
    is_overlapped: whether a product or kernel is scheduled between start and end.
    waiter: the instruction that waits for the end of an asynchronous collective.
    """

    name: str
    kind: str  # one of KINDS
    group: Group
    count: float
    payload: int
    sent: float
    scope: str
    uses: tuple[tuple[str, int], ...]
    is_async: bool = False
    is_overlapped: bool = False
    waiter: str = ""


def list_collectives(module: Module, mesh: Mesh) -> list[Collective]:
    """Return the collectives in scheduled order."""
    return [c for e in module.executed for c in started_collectives(e, mesh)]


def started_collectives(executed: Executed, mesh: Mesh) -> Iterator[Collective]:
    """Yield the collectives that an instruction starts."""
    for inner in executed.instruction.with_nested:
        is_collective = inner.opcode.removesuffix("-start") in KINDS
        is_transfer = inner.opcode == "send" and _HOST_TRANSFER in inner.attributes
        if is_transfer or (is_collective and not _is_continuation(inner)):
            yield _read_collective(executed, inner, mesh)


def sum_collectives(
    collectives: Iterable[Collective], by_use: bool = False
) -> list[CollectiveTotal]:
    """Sum collectives by axes, network, kind and links, and optionally by use."""
    totals = []
    for collective in collectives:
        group = collective.group
        count = collective.count
        uses = collective.uses if by_use else [("", collective.payload)]
        for use, payload in uses:
            total = CollectiveTotal(
                group.axes,
                group.network,
                collective.kind,
                count=count,
                payload=round(count * payload),
                sent=count * collective.sent * payload / max(1, collective.payload),
                overlapped=float(collective.is_overlapped),
                serves=use,
                links=group.links,
            )
            totals.append(total)
    return add_totals(totals)


def _concurrent_dims(executed: Executed, inner: Instruction) -> int | None:
    """Return how many dims of the torus XLA:TPU uses at once; None if not stated.

    XLA annotates the collective, or the fusion around it, with the algorithm. A color
    of a reduction is a ring that passes along one dim after the other. If the rings
    have one direction, a dim needs two colors.
    """
    for instruction in (inner, executed.instruction):
        if gather := instruction.find(r'"emitter":"(\d)DAllGather'):
            return int(gather)
        colors = int(instruction.find(r"Strategy\w*\{colors:(\d+)") or 0)
        if colors := colors or instruction.attributes.count('"phase_rings"'):
            one_way = instruction.find(_ONE_WAY)
            return max(1, colors // 2) if one_way else colors
    return None


def _read_collective(executed: Executed, inner: Instruction, mesh: Mesh) -> Collective:
    kind = inner.opcode.removesuffix("-start")
    if kind == "send":  # The hosts transfer data between slices for a device.
        kind = inner.find(_TRANSFER_KIND).lower().replace("_", "-")
        kind = "collective-permute" if kind == "one-to-one" else kind
        group = slices_group(mesh)
    else:
        if inner.computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # a fusion of an all-reduce and a slice
        group = group_of(inner, mesh, _concurrent_dims(executed, inner))
        if "windowed_dot_general" in inner.computation.name and group.links:
            group = replace(group, links=2)  # Halves travel in either direction.
    factor = group.size if kind == "all-gather" else 1
    uses = operand_uses(executed, inner)
    payload = factor * sum(size for _, size in uses)
    if kind == "ragged-all-to-all":  # The larger buffer has spare capacity.
        buffers = [operand.num_bytes for operand in inner.operands[:2]]
        payload = round(max(buffers) / CAPACITY_FACTOR)
    order = executed.instruction.computation.order
    start = order.index(executed.instruction)
    end = _find_end(executed, inner)
    return Collective(
        name=inner.name,
        kind=kind,
        group=group,
        count=executed.count,
        payload=payload,
        sent=sent_bytes(kind, payload, group.size),
        scope=scope_of(executed, inner),
        uses=tuple((use, factor * size) for use, size in uses),
        is_async=end > start,
        is_overlapped=any(map(multiplies, order[start + 1 : end])),
        waiter=order[end].name if start < end < len(order) else "",
    )


def _is_continuation(inner: Instruction) -> bool:
    """Return whether an earlier fusion has started this collective (TPU)."""
    order = inner.computation.order
    has_start = any("AsyncCollectiveStart" in i.attributes for i in order)
    return bool(inner.find(_CHAIN)) and not has_start


def _find_end(executed: Executed, inner: Instruction) -> int:
    """Return where a collective ends in the schedule: if synchronous, at its start."""
    start = executed.instruction
    order = start.computation.order
    position = order.index(start)
    if '"is_sync":true' in start.attributes:
        return position
    if chain := inner.find(_CHAIN):
        for end in range(position + 1, len(order)):
            nested = order[end].with_nested
            is_part = any(i.find(_CHAIN) == chain for i in nested)
            if is_part and any("AsyncCollectiveDone" in i.attributes for i in nested):
                return end
        return len(order)  # No instruction of the computation waits.
    begun = {start}
    if pair := start.find(_RENDEZVOUS):  # The end waits for the recv of a pair.
        begun = {i for i in order if i.find(_RENDEZVOUS) == pair} - begun
    for end, later in enumerate(order):
        if later.opcode.endswith("-done") and begun & {*later.operands}:
            return end
    return position
