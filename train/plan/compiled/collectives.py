"""List the collectives of a compiled step, with networks and mesh axes.

Each execution of a collective counts once, in every form that XLA emits: one
instruction, a start and a done, several fusions (TPU), a ring of permutes between the
parts of a product (TPU's windowed products), or transfers by the hosts between TPU
slices.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.sharding import Mesh

from train.hardware.interconnect import Group
from train.plan.compiled.attribution import operand_uses, scope_of
from train.plan.compiled.flops import sum_flops
from train.plan.compiled.hlo import Executed, Instruction, Module
from train.plan.compiled.replica_groups import group_of, slices_group
from train.plan.cost import CollectiveTotal, add_totals, sent_bytes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("ragged-all-to-all", "collective-permute", "collective-broadcast"),
)
_RING = {"ag": "all-gather", "rs": "reduce-scatter"}
_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
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
    overlap_flops: the FLOPs of products scheduled between start and end.
    is_ring: whether permutes between the parts of a product form the collective.
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
    overlap_flops: float = 0.0
    is_ring: bool = False
    waiter: str = ""


class _Span(NamedTuple):
    """The schedule positions of a collective's start and end; equal if synchronous."""

    start: int
    end: int


def list_collectives(module: Module, mesh: Mesh) -> list[Collective]:
    """Return the collectives in scheduled order, followed by permutes and rings."""
    collectives, permutes = list[Collective](), list[tuple[Executed, Collective]]()
    for executed in module.executed:
        is_by_hosts = executed.instruction.opcode == "send"
        for collective in started_collectives(executed, mesh):
            if collective.kind == "collective-permute" and not is_by_hosts:
                permutes.append((executed, collective))
            else:
                collectives.append(collective)
    return collectives + _join_rings(module, permutes)


def started_collectives(executed: Executed, mesh: Mesh) -> Iterator[Collective]:
    """Yield the collectives that an instruction starts, each permute separately."""
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
                overlapped=1.0 if collective.overlap_flops else 0.0,
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
    uses, span = operand_uses(executed, inner), _find_span(executed, inner)
    return _make_collective(executed, inner, kind, group, uses=uses, span=span)


def _read_transfer(executed: Executed, mesh: Mesh) -> Collective:
    """Read a transfer between slices, which the hosts perform for a device."""
    send = executed.instruction
    kind = send.find(r'_xla_megascale_transfer_type="(\w+)"').lower().replace("_", "-")
    kind = "collective-permute" if kind == "one-to-one" else kind
    order = send.computation.order
    start = end = order.index(send)
    rendezvous, recv = send.find(_RENDEZVOUS), None
    for position, instruction in enumerate(order):
        if instruction.opcode == "recv" and instruction.find(_RENDEZVOUS) == rendezvous:
            recv = instruction
        elif instruction.opcode == "recv-done" and recv in instruction.operands:
            end = position
    uses = [
        (use, send.operands[0].num_bytes) for use, _ in operand_uses(executed, send)
    ]
    group, span = slices_group(send, mesh), _Span(start, end)
    return _make_collective(executed, send, kind, group, uses=uses[:1], span=span)


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
    uses: Iterable[tuple[str, int]],
    span: _Span,
) -> Collective:
    # The second operand of a send is a token.
    operands = inner.operands[:1] if inner.opcode == "send" else inner.operands
    (start, end), order = span, executed.instruction.computation.order
    factor = group.size if kind == "all-gather" else 1
    payload = factor * sum(operand.num_bytes for operand in operands)
    if kind == "ragged-all-to-all":  # The smaller of operand and result has no padding.
        payload = min(operand.num_bytes for operand in operands[:2])
    return Collective(
        name=inner.name,
        kind=kind,
        group=group,
        count=executed.count,
        payload=payload,
        sent=sent_bytes(kind, payload, group.size),
        dtypes=tuple(sorted({a.dtype for o in operands for a in o.arrays})),
        scope=scope_of(executed, inner),
        uses=tuple((use, factor * size) for use, size in uses),
        is_async=inner.opcode == "send" or end > start,
        overlap_flops=sum_flops(order[start + 1 : end]),
        waiter=order[end].name if start < end < len(order) else "",
    )


def _is_continuation(inner: Instruction) -> bool:
    """Return whether an earlier fusion has started this collective (TPU)."""
    if not inner.find(_CHAIN):
        return False
    order = inner.computation.order
    return not any("AsyncCollectiveStart" in i.attributes for i in order)


def _find_span(executed: Executed, inner: Instruction) -> _Span:
    """Return where a collective starts and ends in its computation's schedule."""
    instruction = executed.instruction
    order = instruction.computation.order
    start = order.index(instruction)
    later_instructions = enumerate(order[start + 1 :], start + 1)
    if '"is_sync":true' in instruction.attributes:
        return _Span(start, start)
    if chain := inner.find(_CHAIN):
        for position, later in later_instructions:
            nested = list(later.nested) if later.opcode == "fusion" else []
            is_part = any(i.find(_CHAIN) == chain for i in nested)
            if is_part and any("AsyncCollectiveDone" in i.attributes for i in nested):
                return _Span(start, position)
        return _Span(start, len(order))
    if instruction.opcode.endswith("-start"):
        for position, later in later_instructions:
            if later.opcode.endswith("-done") and instruction in later.operands:
                return _Span(start, position)
    return _Span(start, start)


def _join_rings(
    module: Module, permutes: list[tuple[Executed, Collective]]
) -> list[Collective]:
    """Join the permutes of each windowed product into one collective."""
    rings, kinds = dict[tuple, list[Executed]](), dict[tuple, str]()
    for executed in module.executed:
        loop = executed.instruction
        if loop.opcode == "while" and (match := _WINDOWED.search(loop.body.name)):
            key = (loop.loop.op_name, executed.loops)
            rings.setdefault(key, []).append(executed)
            kinds[key] = _RING[match[1]]
    joined, others = dict[tuple, list[Collective]](), []
    for executed, permute in permutes:
        loops = executed.loops
        key = (executed.instruction.op_name, loops)
        if loops and _WINDOWED.search(loops[-1].body.name):
            key = (loops[-1].op_name, loops[:-1])
        if key in rings:
            joined.setdefault(key, []).append(permute)
        else:
            others.append(permute)
    return others + [_join(kinds[key], rings[key], joined[key]) for key in joined]


def _join(kind: str, loops: list[Executed], permutes: list[Collective]) -> Collective:
    first_permute, count = permutes[0], sum(loop.count for loop in loops)
    payload = first_permute.payload * first_permute.group.size
    uses = {permute.uses[0][0] for permute in permutes}
    single_uses = {use for use in uses if "," not in use}
    return replace(
        first_permute,
        name=loops[0].instruction.name,
        kind=kind,
        count=count,
        payload=payload,
        sent=sum(permute.sent * permute.count for permute in permutes) / count,
        uses=((", ".join(sorted(single_uses or uses)), payload),),
        overlap_flops=max(permute.overlap_flops for permute in permutes),
        is_ring=True,
    )
