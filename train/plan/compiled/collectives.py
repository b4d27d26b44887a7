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
from train.plan.compiled.attribution import scope, serves
from train.plan.compiled.flops import flops_between, parts
from train.plan.compiled.hlo import (
    BODY,
    Computation,
    Executed,
    Instruction,
    Loop,
    Module,
)
from train.plan.compiled.replica_groups import group_of, slices_group
from train.plan.cost import CollectiveTotal, sent_bytes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("ragged-all-to-all", "collective-permute", "collective-broadcast"),
)
_RING = {"ag": "all-gather", "rs": "reduce-scatter"}
_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'  # of a send and its recv
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


def ledger(module: Module, mesh: Mesh) -> list[Collective]:
    """List the collectives of a program, in the order in which they are scheduled."""
    found, permutes = list[Collective](), list[tuple[Executed, Collective]]()
    for executed in module.executed:
        by_hosts = executed.instruction.opcode == "send"
        for collective in started(module, executed, mesh):
            if collective.kind == "collective-permute" and not by_hosts:
                permutes.append((executed, collective))
            else:
                found.append(collective)
    return found + _rings(module, permutes)


def started(module: Module, executed: Executed, mesh: Mesh) -> Iterator[Collective]:
    """Give the collectives that an instruction starts, each permute on its own."""
    for inner, within in parts(module, executed):
        kind = inner.opcode.removesuffix("-start")
        if inner.opcode == "send" and _HOST_TRANSFER in inner.attributes:
            yield _transfer(module, executed, mesh)
        elif kind in KINDS and not _goes_on(inner, within):
            yield _collective(module, executed, inner, within, kind, mesh)


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
        return c.group.axes, c.group.network, c.kind, use

    rows = []
    for (axes, network, kind, use), group in groupby(sorted(pieces, key=key), key):
        of = [
            (c, share * c.times, c.times * c.sent * share / max(1, c.payload))
            for c, _, share in group
        ]
        sent = sum(s for *_, s in of)
        hidden = sum(s for c, _, s in of if c.overlap_flops)
        payload, count = sum(p for _, p, _ in of), sum(c.times for c, *_ in of)
        share = hidden / sent if sent else 0.0
        rows.append(
            CollectiveTotal(axes, network, kind, count, payload, sent, share, use)
        )
    return sorted(rows, key=lambda row: -row.sent)


def outside_layers(collectives: Sequence[Collective]) -> list[CollectiveTotal]:
    """Itemize by use what does not belong to the layers."""
    return totals(
        (c for c in collectives if not c.scope.startswith("layers")), by_use=True
    )


def _collective(
    module: Module,
    executed: Executed,
    inner: Instruction,
    within: Computation,
    kind: str,
    mesh: Mesh,
) -> Collective:
    if within.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a fused all-reduce of which each device keeps a slice
    group = group_of(inner, mesh)
    start, end = _span(module, executed, inner, within)
    uses = serves(module, executed, inner, within)
    operands, is_async = within.operands(inner), end > start
    return _made(
        module, executed, inner, operands, kind, group, uses, (start, end), is_async
    )


def _made(
    module: Module,
    executed: Executed,
    inner: Instruction,
    operands: Sequence[Instruction],
    kind: str,
    group: Group,
    uses: Iterable[tuple[str, int]],
    span: tuple[int, int],
    is_async: bool,
) -> Collective:
    """Put a collective together from what it sends, to whom, what for and when."""
    factor = group.size if kind == "all-gather" else 1
    payload = factor * sum(operand.num_bytes for operand in operands)
    start, end = span
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
        is_async=is_async,
        overlap_flops=flops_between(module, executed.computation, start, end),
        until=_name_at(executed, end) if end > start else "",
    )


def _goes_on(inner: Instruction, within: Computation) -> bool:
    """Say whether this is a later piece of a collective that TPU cut over fusions."""
    if not inner.find(r'chain_id="(\d+)"'):
        return False
    return not any(
        "AsyncCollectiveStart" in i.attributes for i in within.instructions.values()
    )


def _span(
    module: Module, executed: Executed, inner: Instruction, within: Computation
) -> tuple[int, int]:
    """Find where a collective starts and ends; twice the same if it is synchronous."""
    order = list(executed.computation.instructions.values())
    start = order.index(executed.instruction)
    if '"is_sync":true' in executed.instruction.attributes:
        return start, start
    chain = inner.find(r'chain_id="(\d+)"')
    if chain:
        for at, later in enumerate(order[start + 1 :], start + 1):
            held = list(module.inside(later)) if later.opcode == "fusion" else []
            same = any(i.find(r'chain_id="(\d+)"') == chain for i, _ in held)
            if same and any("AsyncCollectiveDone" in i.attributes for i, _ in held):
                return start, at
        return start, len(order)
    if executed.instruction.opcode.endswith("-start"):
        name = executed.instruction.name
        for at, later in enumerate(order[start + 1 :], start + 1):
            if later.opcode.endswith("-done") and name in later.operands:
                return start, at
    return start, start


def _name_at(executed: Executed, place: int) -> str:
    """Name an instruction by its place in the schedule; "" behind the last one."""
    names = list(executed.computation.instructions)
    return names[place] if place < len(names) else ""


def _rings(
    module: Module, permutes: list[tuple[Executed, Collective]]
) -> list[Collective]:
    """Join the permutes of each windowed product to the collective that they are."""
    windowed = [
        (executed, loop, found[1])
        for executed in module.executed
        if executed.instruction.opcode == "while"
        for loop in [module.loops[executed.instruction.find(BODY)]]
        if (found := _WINDOWED.search(loop.body))
    ]
    rings = dict[tuple, list[Executed]]()
    kinds = dict[tuple, str]()
    for executed, loop, form in windowed:
        key = (loop.op_name, executed.loops)
        rings.setdefault(key, []).append(executed)
        kinds[key] = _RING[form]
    pieces, plain = dict[tuple, list[tuple[Executed, Collective]]](), []
    for executed, permute in permutes:
        loops: tuple[Loop, ...] = executed.loops
        key = (executed.instruction.op_name, loops)
        if loops and _WINDOWED.search(loops[-1].body):
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


def _transfer(module: Module, executed: Executed, mesh: Mesh) -> Collective:
    """Read what the hosts send from slice to slice for this device."""
    send = executed.instruction
    kind = send.find(r'_xla_megascale_transfer_type="(\w+)"').lower().replace("_", "-")
    group = slices_group(send, mesh)
    sent = executed.computation.operands(send)[0]
    order = list(executed.computation.instructions.values())
    start = end = order.index(send)
    meeting, answer = send.find(_RENDEZVOUS), ""
    for at, other in enumerate(order):
        if other.opcode == "recv" and other.find(_RENDEZVOUS) == meeting:
            answer = other.name
        elif other.opcode == "recv-done" and answer in other.operands:
            end = at
    uses = serves(module, executed, send, executed.computation)[:1]
    whole = [(use, sent.num_bytes) for use, _ in uses]
    span = start, end
    return _made(module, executed, send, [sent], kind, group, whole, span, True)
