"""What a step computes, reads and sends, for people and for programs."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from train.console import print_table
from train.plan.compiled.collectives import Total, ledger, outside_layers, totals
from train.plan.compiled.flops import Work, work
from train.plan.compiled.hlo import Module
from train.plan.memory import COMPILED
from train.program import Program
from train.units import format_bytes, format_flops


@dataclass(frozen=True)
class Execution:
    """One step of one device, as compiled.

    model_flops: what the model needs of a device (convention: train/flops.py).
    work: what is executed.
    sent: collectives by mesh axes, network and kind.
    outside_layers: those that no layer does, by what they serve.
    unread: instructions that the reader of the program's text does not know.
    how: all this is known.
    """

    model_flops: float
    work: Work
    sent: list[Total]
    outside_layers: list[Total]
    unread: tuple[str, ...] = ()
    how: str = COMPILED

    def as_json(self) -> dict[str, Any]:
        """Give all figures as plain values."""
        ratio = self.work.flops / self.model_flops
        return {**dataclasses.asdict(self), "executed_over_model_flops": ratio}


def read_execution(program: Program, module: Module) -> Execution:
    """Read a compiled step."""
    collectives = ledger(module, program.mesh)
    return Execution(
        model_flops=program.flops_per_step / program.mesh.size,
        work=work(module),
        sent=totals(collectives),
        outside_layers=outside_layers(collectives),
        unread=tuple(module.unread),
    )


def print_execution(executed: Execution) -> None:
    """Print what a step computes, then what it sends, and what for."""
    work = executed.work
    ratio = work.flops / executed.model_flops
    print(
        f"computes    {format_flops(work.flops)} a device and step, {ratio:.2f} x "
        f"the model's; {format_bytes(work.memory_bytes)} to and from memory at most"
    )
    if work.unknown:
        print(f"            without these kernels: {', '.join(work.unknown)}")
    headers = ["axes", "network", "kind", "times", "payload", "sent", "overlapped"]
    print_table(
        [cells(total) for total in executed.sent],
        headers,
        "collectives of a step (sent: by each device, in rings; overlapped: beside "
        "products)",
    )
    print_table(
        [[*cells(total), total.serves] for total in executed.outside_layers],
        [*headers, "for"],
        "of these outside the layers",
    )
    if executed.unread:
        print(f"not read    {len(executed.unread)} lines of the program's text")


def cells(total: Total) -> list[str]:
    """Give axes, network, kind, times, payload, sent and overlapped as text."""
    return [
        " ".join(total.axes) or "none",
        total.network,
        total.kind,
        f"{total.count:,}",
        format_bytes(total.payload),
        format_bytes(total.sent),
        f"{total.overlapped:.0%}",
    ]
