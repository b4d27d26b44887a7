"""What a step computes and sends, as tables of HTML."""

from html import escape

from train.plan.cost import StepCost, cells
from train.run.html import table
from train.units import format_bytes, format_flops


def execution_sections(executed: StepCost | None) -> str:
    """Say what a device computes in a step, what it sends, and what for."""
    if executed is None:
        return (
            "<section><h2>What a step computes and sends</h2>"
            '<p class="hint">Not known: there is no compiled step.</p></section>'
        )
    flops, how = executed.flops, executed.how
    rows = [
        ("Model FLOPs", format_flops(executed.model_flops), "computed"),
        ("Executed", format_flops(flops.total), how),
        ("Executed over model", f"{flops.total / executed.model_flops:.2f}", how),
        ("of these products", format_flops(flops.products), how),
        ("of these attention kernels", format_flops(flops.attention), how),
        ("To and from memory, at most", format_bytes(executed.hbm_bytes.total), how),
    ]
    rows += [("Kernels without a count", name, how) for name in flops.unknown]
    if executed.unread:
        rows.append(("Lines of the program not read", f"{len(executed.unread):,}", how))
    outside = [[total.serves, *cells(total)] for total in executed.outside_layers]
    headers = ["Axes", "Network", "Kind", "Times", "Payload", "Sent", "Beside products"]
    return (
        "<section><h2>What a device computes in a step</h2>"
        f"{table(['', 'Figure', 'Known by'], rows)}</section>"
        "<section><h2>What a device sends in a step</h2>"
        '<p class="hint">Bytes sent assume rings. Beside products: the share that is '
        f"scheduled so that products can hide it. All {escape(how)}.</p>"
        f"{table(headers, map(cells, executed.sent), 3)}</section>"
        "<section><h2>Of these outside the layers</h2>"
        f"{table(['For', *headers], outside, 4)}</section>"
    )
