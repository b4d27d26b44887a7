"""What a compiled step sends, over which network and along which axes of the mesh.

A collective counts once each time that it runs, however XLA wrote it down: as one
instruction, as a start and a done, cut over several fusions (TPU), as a ring of
permutes between the parts of a product (TPU's windowed products), or as a transfer by
the hosts between TPU slices.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from jax.sharding import Mesh

from train.hardware.interconnect import Group
from train.plan.compiled.attribution import operand_uses, scope_of
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
_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'  # of a send and its recv
_CHAIN = r'chain_id="(\d+)"'  # of the fusions that a collective is cut over
_HOST_TRANSFER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'


@dataclass(frozen=True)
class Collective:
    """One of a program's collectives; bytes are of one execution."""

    name: str
    kind: str  # of KINDS
    group: Group
    times: int  # in one run of the program
    payload: int
    sent: float  # by each device
    dtypes: tuple[str, ...]
    scope: str  # where it stands: "layers backward", ...; "" for none of those
    serves: tuple[tuple[str, int], ...]  # what, and its share of the payload
    is_async: bool = False
    overlap_flops: float = 0.0  # products scheduled between its start and its end
    is_ring: bool = False  # done by permutes between the parts of a product
    until: str = ""  # the instruction that waits for its end, if it is asynchronous


def list_collectives(module: Module, mesh: Mesh) -> list[Collective]:
    """List the collectives of a program, in the order in which they are scheduled."""
    found, permutes = list[Collective](), list[tuple[Executed, Collective]]()
    for executed in module.executed:
        by_hosts = executed.instruction.opcode == "send"
        for collective in started_collectives(executed, mesh):
            if collective.kind == "collective-permute" and not by_hosts:
                permutes.append((executed, collective))
            else:
                found.append(collective)
    return found + _rings(module, permutes)


def started_collectives(executed: Executed, mesh: Mesh) -> Iterator[Collective]:
    """Return the collectives that an instruction starts, each permute on its own."""
    for inner in executed.instruction.with_nested:
        kind = inner.opcode.removesuffix("-start")
        if inner.opcode == "send" and _HOST_TRANSFER in inner.attributes:
            yield _transfer(executed, mesh)
        elif kind in KINDS and not _goes_on(inner):
            yield _collective(executed, inner, kind, mesh)


def sum_collectives(
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
        of = [
            (c, share * c.times, c.times * c.sent * share / max(1, c.payload))
            for c, _, share in group
        ]
        sent = sum(s for *_, s in of)
        hidden = sum(s for c, _, s in of if c.overlap_flops)
        payload, count = sum(p for _, p, _ in of), sum(c.times for c, *_ in of)
        share = hidden / sent if sent else 0.0
        rows.append(
            CollectiveTotal(
                axes, network, kind, count, payload, sent, share, use, links
            )
        )
    return sorted(rows, key=lambda row: -row.sent)


def outside_layers(collectives: Sequence[Collective]) -> list[CollectiveTotal]:
    """Itemize by use what does not belong to the layers."""
    return sum_collectives(
        (c for c in collectives if not c.scope.startswith("layers")), by_use=True
    )


def _collective(
    executed: Executed, inner: Instruction, kind: str, mesh: Mesh
) -> Collective:
    if inner.computation.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a fused all-reduce of which each device keeps a slice
    dims = _dims_at_once(executed, inner)
    group, span = group_of(inner, mesh, dims), _span(executed, inner)
    return _made(executed, inner, kind, group, operand_uses(executed, inner), span)


def _dims_at_once(executed: Executed, inner: Instruction) -> int | None:
    """Read how many dims of the torus XLA:TPU uses at once; None: it does not say.

    It writes the form that it chose for a gather (2DAllGather...) or a sum (colors:2)
    beside the collective, or beside the fusion that holds it. Each color is a ring in
    both directions along one dim after the other, but of a UniDirection strategy one in
    one direction.
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
    (start, end), order = span, executed.instruction.computation.order
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
        scope=scope_of(executed, inner),
        serves=tuple((use, factor * size) for use, size in uses),
        is_async=inner.opcode == "send" or end > start,
        overlap_flops=computed_flops(order[start + 1 : end]),
        until=order[end].name if start < end < len(order) else "",
    )


def _goes_on(inner: Instruction) -> bool:
    """Tell whether this is a later piece of a collective that TPU cut over fusions."""
    if not inner.find(_CHAIN):
        return False
    return not any(
        "AsyncCollectiveStart" in i.attributes for i in inner.computation.order
    )


def _span(executed: Executed, inner: Instruction) -> tuple[int, int]:
    """Find where a collective starts and ends; twice the same if it is synchronous."""
    own = executed.instruction
    order = own.computation.order
    start = order.index(own)
    if '"is_sync":true' in own.attributes:
        return start, start
    if chain := inner.find(_CHAIN):
        for at, later in enumerate(order[start + 1 :], start + 1):
            held = list(later.nested) if later.opcode == "fusion" else []
            same = any(i.find(_CHAIN) == chain for i in held)
            if same and any("AsyncCollectiveDone" in i.attributes for i in held):
                return start, at
        return start, len(order)
    if own.opcode.endswith("-start"):
        for at, later in enumerate(order[start + 1 :], start + 1):
            if later.opcode.endswith("-done") and own in later.operands:
                return start, at
    return start, start


def _rings(
    module: Module, permutes: list[tuple[Executed, Collective]]
) -> list[Collective]:
    """Join the permutes of each windowed product to the collective that they are."""
    rings, kinds = dict[tuple, list[Executed]](), dict[tuple, str]()
    for executed in module.executed:
        own = executed.instruction
        if own.opcode == "while" and (found := _WINDOWED.search(own.body.name)):
            key = (own.loop.op_name, executed.loops)
            rings.setdefault(key, []).append(executed)
            kinds[key] = _RING[found[1]]
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
    return plain + [_ring(kinds[key], rings[key], of) for key, of in pieces.items()]


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
    order = send.computation.order
    start = end = order.index(send)
    meeting, answer = send.find(_RENDEZVOUS), None
    for at, other in enumerate(order):
        if other.opcode == "recv" and other.find(_RENDEZVOUS) == meeting:
            answer = other
        elif other.opcode == "recv-done" and answer in other.operands:
            end = at
    sent = send.operands[0].num_bytes
    whole = [(use, sent) for use, _ in operand_uses(executed, send)[:1]]
    group = slices_group(send, mesh)
    return _made(executed, send, kind, group, whole, (start, end))
