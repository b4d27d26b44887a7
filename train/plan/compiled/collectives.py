"""List the collectives of a compiled step, with their networks and mesh axes.

A collective counts once each time it runs, in whatever form XLA wrote it: as one
instruction, as a start and a done, split over several fusions (TPU), as a ring of
permutes between the parts of a product (TPU's windowed products), or as a transfer by
the hosts between TPU slices.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from jax.sharding import Mesh

from train.hardware.interconnect import Group
from train.plan.compiled.attribution import scope, serves
from train.plan.compiled.flops import computed_flops
from train.plan.compiled.hlo import Executed, Instruction, Module
from train.plan.compiled.replica_groups import group_of, slices_group
from train.plan.cost import CollectiveTotal, sent_bytes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("ragged-all-to-all", "collective-permute", "collective-broadcast"),
)
_RING = {"ag": "all-gather", "rs": "reduce-scatter"}
_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'  # joins a send and its recv
_CHAIN = r'chain_id="(\d+)"'  # joins the fusions over which a collective is split
_HOST_TRANSFER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'


@dataclass(frozen=True)
class Collective:
    """One of a program's collectives; bytes are of one execution."""

    name: str
    kind: str  # one of KINDS
    group: Group
    times: int  # in one run of the program
    payload: int
    sent: float  # bytes sent by each device
    dtypes: tuple[str, ...]
    scope: str  # the scope of the step, such as "layers backward"; "" if there is none
    serves: tuple[tuple[str, int], ...]  # parts of the model, and their payloads
    is_async: bool = False
    overlap_flops: float = 0.0  # products scheduled between its start and its end
    is_ring: bool = False  # done by permutes between the parts of a product
    until: str = ""  # the instruction that waits for its end, if it is asynchronous


def ledger(module: Module, mesh: Mesh) -> list[Collective]:
    """List the collectives of a program, in the order in which they are scheduled."""
    collectives, permutes = list[Collective](), list[tuple[Executed, Collective]]()
    for executed in module.executed:
        by_hosts = executed.instruction.opcode == "send"
        for collective in started(executed, mesh):
            if collective.kind == "collective-permute" and not by_hosts:
                permutes.append((executed, collective))
            else:
                collectives.append(collective)
    return collectives + _rings(module, permutes)


def started(executed: Executed, mesh: Mesh) -> Iterator[Collective]:
    """Return the collectives that an instruction starts, each permute on its own."""
    for inner in executed.instruction.parts:
        kind = inner.opcode.removesuffix("-start")
        if inner.opcode == "send" and _HOST_TRANSFER in inner.attributes:
            yield _transfer(executed, mesh)
        elif kind in KINDS and not _goes_on(inner):
            yield _collective(executed, inner, kind, mesh)


def totals(
    collectives: Iterable[Collective], by_use: bool = False
) -> list[CollectiveTotal]:
    """Sum collectives by axes, network and kind, and by what they serve if asked."""
    pieces = [
        (c, use if by_use else "", share)
        for c in collectives
        for use, share in (c.serves if by_use else [("", c.payload)])
    ]

    def key(piece: tuple[Collective, str, int]):
        c, use, _ = piece
        return c.group.axes, c.group.network, c.kind, use, c.group.links

    rows = []
    for (axes, network, kind, use, links), group in groupby(
        sorted(pieces, key=key), key
    ):
        same_kind = [
            (c, share * c.times, c.times * c.sent * share / max(1, c.payload))
            for c, _, share in group
        ]
        sent = sum(s for *_, s in same_kind)
        hidden = sum(s for c, _, s in same_kind if c.overlap_flops)
        payload, count = (
            sum(p for _, p, _ in same_kind),
            sum(c.times for c, *_ in same_kind),
        )
        share = hidden / sent if sent else 0.0
        rows.append(
            CollectiveTotal(
                axes,
                network,
                kind=kind,
                count=count,
                payload=payload,
                sent=sent,
                overlapped=share,
                serves=use,
                links=links,
            )
        )
    return sorted(rows, key=lambda row: -row.sent)


def outside_layers(collectives: Sequence[Collective]) -> list[CollectiveTotal]:
    """Itemize by use what does not belong to the layers."""
    return totals(
        (c for c in collectives if not c.scope.startswith("layers")), by_use=True
    )


def _collective(
    executed: Executed, inner: Instruction, kind: str, mesh: Mesh
) -> Collective:
    if inner.within.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a fused all-reduce of which each device keeps a slice
    dims = _dims_at_once(executed, inner)
    group, span = group_of(inner, mesh, dims), _span(executed, inner)
    return _made(
        executed, inner, kind=kind, group=group, uses=serves(executed, inner), span=span
    )


def _dims_at_once(executed: Executed, inner: Instruction) -> int | None:
    """Read how many dims of the torus XLA:TPU uses at once; None if it does not say.

    XLA writes the chosen form of a gather (2DAllGather...) or of a sum (colors:2) on
    the collective or on the fusion that contains it. Each color is a ring in both
    directions along one dim after another; with a UniDirection strategy in one
    direction.
    """
    for instruction in (inner, executed.instruction):
        if gather := instruction.find(r'"emitter":"(\d)DAllGather'):
            return int(gather)
        if colors := instruction.find(r"Strategy\w*\{colors:(\d+)"):
            one_way = instruction.find(r"(UniDirection)\w*Strategy\w*\{colors")
            return max(1, int(colors) // 2) if one_way else int(colors)
    return None


def _made(
    executed: Executed,
    inner: Instruction,
    kind: str,
    group: Group,
    uses: Iterable[tuple[str, int]],
    span: tuple[int, int],
) -> Collective:
    """Put a collective together from what it sends, to whom, what for and when."""
    # The second operand of what hosts send is a token.
    operands = inner.operands[:1] if inner.opcode == "send" else inner.operands
    (start, end), order = span, executed.instruction.within.order
    factor = group.size if kind == "all-gather" else 1
    payload = factor * sum(operand.num_bytes for operand in operands)
    if kind == "ragged-all-to-all":  # the smaller of operand and result is full
        payload = min(operand.num_bytes for operand in operands[:2])
    return Collective(
        name=inner.name,
        kind=kind,
        group=group,
        times=executed.times,
        payload=payload,
        sent=sent_bytes(kind, payload, group.size),
        dtypes=tuple(sorted({a.dtype for o in operands for a in o.arrays})),
        scope=scope(executed, inner),
        serves=tuple((use, factor * size) for use, size in uses),
        is_async=inner.opcode == "send" or end > start,
        overlap_flops=computed_flops(order[start + 1 : end]),
        until=order[end].name if start < end < len(order) else "",
    )


def _goes_on(inner: Instruction) -> bool:
    """Tell whether this is a later piece of a collective that TPU cut over fusions."""
    if not inner.find(_CHAIN):
        return False
    return not any("AsyncCollectiveStart" in i.attributes for i in inner.within.order)


def _span(executed: Executed, inner: Instruction) -> tuple[int, int]:
    """Find where a collective starts and ends; twice the same if it is synchronous."""
    instruction = executed.instruction
    order = instruction.within.order
    start = order.index(instruction)
    if '"is_sync":true' in instruction.attributes:
        return start, start
    if chain := inner.find(_CHAIN):
        for index, later in enumerate(order[start + 1 :], start + 1):
            fused = list(later.inside) if later.opcode == "fusion" else []
            in_chain = any(i.find(_CHAIN) == chain for i in fused)
            if in_chain and any("AsyncCollectiveDone" in i.attributes for i in fused):
                return start, index
        return start, len(order)
    if instruction.opcode.endswith("-start"):
        for index, later in enumerate(order[start + 1 :], start + 1):
            if later.opcode.endswith("-done") and instruction in later.operands:
                return start, index
    return start, start


def _rings(
    module: Module, permutes: list[tuple[Executed, Collective]]
) -> list[Collective]:
    """Join the permutes of each windowed product to the collective that they are."""
    rings, kinds = dict[tuple, list[Executed]](), dict[tuple, str]()
    for executed in module.executed:
        instruction = executed.instruction
        if instruction.opcode == "while" and (
            match := _WINDOWED.search(instruction.body.name)
        ):
            key = (instruction.loop.op_name, executed.loops)
            rings.setdefault(key, []).append(executed)
            kinds[key] = _RING[match[1]]
    pieces, plain = dict[tuple, list[tuple[Executed, Collective]]](), []
    for executed, permute in permutes:
        loops = executed.loops
        key = (executed.instruction.op_name, loops)
        if loops and _WINDOWED.search(loops[-1].body.name):
            key = (loops[-1].op_name, loops[:-1])
        if key in rings:
            pieces.setdefault(key, []).append((executed, permute))
        else:
            plain.append(permute)
    return plain + [
        _ring(kinds[key], rings[key], members) for key, members in pieces.items()
    ]


def _ring(
    kind: str, loops: list[Executed], pieces: list[tuple[Executed, Collective]]
) -> Collective:
    first = pieces[0][1]
    times = sum(loop.times for loop in loops)
    payload = first.payload * first.group.size
    sent = sum(p.sent * p.times for _, p in pieces)
    hidden = sum(p.sent * p.times for _, p in pieces if p.overlap_flops)
    uses = {p.serves[0][0] for _, p in pieces}
    exact = {use for use in uses if "," not in use}
    return replace(
        first,
        name=loops[0].instruction.name,
        kind=kind,
        times=times,
        payload=payload,
        sent=sent / times,
        serves=((", ".join(sorted(exact or uses)), payload),),
        overlap_flops=max(p.overlap_flops for _, p in pieces) if hidden else 0.0,
        is_ring=True,
    )


def _transfer(executed: Executed, mesh: Mesh) -> Collective:
    """Read what the hosts send from slice to slice for this device."""
    send = executed.instruction
    kind = send.find(r'_xla_megascale_transfer_type="(\w+)"').lower().replace("_", "-")
    kind = "collective-permute" if kind == "one-to-one" else kind
    order = send.within.order
    start = end = order.index(send)
    meeting, answer = send.find(_RENDEZVOUS), None
    for index, later in enumerate(order):
        if later.opcode == "recv" and later.find(_RENDEZVOUS) == meeting:
            answer = later
        elif later.opcode == "recv-done" and answer in later.operands:
            end = index
    sent = send.operands[0].num_bytes
    shares = [(use, sent) for use, _ in serves(executed, send)[:1]]
    group = slices_group(send, mesh)
    return _made(executed, send, kind=kind, group=group, uses=shares, span=(start, end))
