"""List the collectives of a compiled step, with networks and mesh axes.

Each execution of a collective counts once, in every form that XLA emits: one
instruction, a start and a done, several fusions (TPU), or transfers by the hosts
between TPU slices. Where XLA:TPU gathers in a ring between the parts of a product, each
permute of the ring counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax.sharding import Mesh

from train.hardware.interconnect import Group
from train.plan.compiled.attribution import operand_uses, scope_of
from train.plan.compiled.flops import is_kernel, product_flops
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
_HOST_TRANSFER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'


@dataclass(frozen=True)
class Collective:
    """A collective of a program; bytes are those of one execution.

    name: the name of the instruction.
    kind: one of KINDS.
    group: the devices of one group.
    count: executions in one run of the program.
    payload, sent: bytes as defined in train/plan/cost.py.
    dtypes: the dtypes of the operands.
    scope: the scope in the step, for example "layers backward"; may be "".
    uses: the parts of the model that use the result, with their bytes of `payload`.
    is_async: whether the collective can run concurrently with other instructions.
    is_overlapped: whether a product or kernel is scheduled between start and end.
    waiter: the instruction that waits for the end of an asynchronous collective.
    """

    name: str
    kind: str
    group: Group
    count: int
    payload: int
    sent: float
    dtypes: tuple[str, ...]
    scope: str
    uses: tuple[tuple[str, int], ...]
    is_async: bool = False
    is_overlapped: bool = False
    waiter: str = ""


def list_collectives(module: Module, mesh: Mesh) -> list[Collective]:
    """Return the collectives in scheduled order."""
    return [
        collective
        for executed in module.executed
        for collective in started_collectives(executed, mesh)
    ]


def started_collectives(executed: Executed, mesh: Mesh) -> Iterator[Collective]:
    """Yield the collectives that an instruction starts."""
    for inner in executed.instruction.with_nested:
        kind = inner.opcode.removesuffix("-start")
        if inner.opcode == "send" and _HOST_TRANSFER in inner.attributes:
            yield _read_transfer(executed, mesh)
        elif kind in KINDS and not _is_continuation(inner):
            yield _read_collective(executed, inner, kind, mesh)


def sum_collectives(
    collectives: Iterable[Collective], by_use: bool = False
) -> list[CollectiveTotal]:
    """Sum collectives by axes, network, kind and links, and optionally by use."""
    totals = []
    for collective in collectives:
        group, count = collective.group, collective.count
        uses = collective.uses if by_use else [("", collective.payload)]
        for use, payload in uses:
            total = CollectiveTotal(
                group.axes,
                group.network,
                collective.kind,
                count=count,
                payload=count * payload,
                sent=count * collective.sent * payload / max(1, collective.payload),
                overlapped=float(collective.is_overlapped),
                serves=use,
                links=group.links,
            )
            totals.append(total)
    return add_totals(totals)


def _read_collective(
    executed: Executed, inner: Instruction, kind: str, mesh: Mesh
) -> Collective:
    if inner.computation.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a fusion of an all-reduce and a slice
    group = group_of(inner, mesh, _concurrent_dims(executed, inner))
    factor = group.size if kind == "all-gather" else 1
    payload = factor * sum(operand.num_bytes for operand in inner.operands)
    if kind == "ragged-all-to-all":  # The smaller of operand and result has no padding.
        payload = min(operand.num_bytes for operand in inner.operands[:2])
    uses = [(use, factor * size) for use, size in operand_uses(executed, inner)]
    return _make_collective(executed, inner, kind, group, payload=payload, uses=uses)


def _read_transfer(executed: Executed, mesh: Mesh) -> Collective:
    """Read a transfer between slices, which the hosts perform for a device."""
    send = executed.instruction
    kind = send.find(r'_xla_megascale_transfer_type="(\w+)"').lower().replace("_", "-")
    kind = "collective-permute" if kind == "one-to-one" else kind
    payload = send.operands[0].num_bytes
    (use, _), *_ = operand_uses(executed, send)
    group, uses = slices_group(send, mesh), [(use, payload)]
    return _make_collective(executed, send, kind, group, payload=payload, uses=uses)


def _concurrent_dims(executed: Executed, inner: Instruction) -> int | None:
    """Return how many dims of the torus XLA:TPU uses at once; None if not stated.

    XLA annotates the collective, or the fusion around it, with the algorithm of a
    gather (2DAllGather...) or a reduction (colors:2), or with the phases of each color
    on a SparseCore. Each color is a ring that passes along one dim after the other. If
    the rings have one direction, a dim needs two colors.
    """
    for instruction in (inner, executed.instruction):
        if gather := instruction.find(r'"emitter":"(\d)DAllGather'):
            return int(gather)
        colors = int(instruction.find(r"Strategy\w*\{colors:(\d+)") or 0)
        if colors := colors or instruction.attributes.count('"phase_rings"'):
            one_way = instruction.find(_ONE_WAY)
            return max(1, colors // 2) if one_way else colors
    return None


def _make_collective(
    executed: Executed,
    inner: Instruction,
    kind: str,
    group: Group,
    *,
    payload: int,
    uses: list[tuple[str, int]],
) -> Collective:
    end, order = _find_end(executed, inner), executed.instruction.computation.order
    during = order[order.index(executed.instruction) + 1 : end]
    # The second operand of a send is a token.
    operands = inner.operands[:1] if inner.opcode == "send" else inner.operands
    return Collective(
        name=inner.name,
        kind=kind,
        group=group,
        count=executed.count,
        payload=payload,
        sent=sent_bytes(kind, payload, group.size),
        dtypes=tuple(sorted({a.dtype for o in operands for a in o.arrays})),
        scope=scope_of(executed, inner),
        uses=tuple(uses),
        is_async=end is not None,
        is_overlapped=end is not None and any(map(_has_products, during)),
        waiter=order[end].name if end is not None and end < len(order) else "",
    )


def _has_products(instruction: Instruction) -> bool:
    """Return whether an instruction multiplies, also inside loops and branches."""
    if product_flops(instruction) or is_kernel(instruction):
        return True
    bodies = [instruction.body] if instruction.opcode == "while" else instruction.called
    return any(_has_products(inner) for body in bodies for inner in body.order)


def _is_continuation(inner: Instruction) -> bool:
    """Return whether an earlier fusion has started this collective (TPU)."""
    if not inner.find(_CHAIN):
        return False
    order = inner.computation.order
    return not any("AsyncCollectiveStart" in i.attributes for i in order)


def _find_end(executed: Executed, inner: Instruction) -> int | None:
    """Return where an asynchronous collective ends in the schedule, otherwise None.

    The end is after the last instruction if no instruction of the computation waits.
    """
    start = executed.instruction
    order = start.computation.order
    if '"is_sync":true' in start.attributes:
        return None
    if chain := inner.find(_CHAIN):
        for position in range(order.index(start) + 1, len(order)):
            nested = order[position].with_nested
            is_part = any(i.find(_CHAIN) == chain for i in nested)
            if is_part and any("AsyncCollectiveDone" in i.attributes for i in nested):
                return position
        return len(order)
    if start.opcode == "send":
        rendezvous = start.find(_RENDEZVOUS)
        waited = [i for i in order if i.opcode == "recv"]
        waited = [i for i in waited if i.find(_RENDEZVOUS) == rendezvous]
    else:
        waited = [start] if start.opcode.endswith("-start") else []
    ends = (
        position
        for position, later in enumerate(order)
        if later.opcode.endswith("-done") and {*waited} & {*later.operands}
    )
    return next(ends, None)
