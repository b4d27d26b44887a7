"""What XLA made of a step, for people: its texts in files, and what matters in them."""

from dataclasses import asdict
from typing import Any

from etils import epath

from train.console import print_table
from train.plan.aot import lower_step
from train.plan.compiled.inspection import Inspection
from train.program import Program
from train.run.storage import write_whole
from train.units import format_bytes

_NAMED = 3  # of what is not updated in place


def write_texts(program: Program, text: str, folder: epath.Path) -> list[str]:
    """Write a step as it was traced, lowered and optimized; return the files' names.

    `text` is that of the optimized module; the folder exists.
    """
    traced, lowered = lower_step(program)
    texts = {
        "step.jaxpr": str(traced.jaxpr),
        "step.stablehlo": lowered.as_text(),
        "step.hlo": text,
    }
    for name, content in texts.items():
        write_whole(folder / name, content + "\n")
    return list(texts)


def sentences(found: Inspection) -> list[tuple[str, str]]:
    """Return what matters of a compiled step, as names and sentences."""
    updated, others = found.in_place
    in_place = f"all {len(updated)} arrays of the state are updated where they are"
    if others:
        named = ", ".join(others[:_NAMED]) + ", ..." * (len(others) > _NAMED)
        in_place = f"{len(updated)} of {len(updated + others)} arrays of the state; "
        in_place += f"not {named}"
    kernels = ", ".join(f"{name} {n} x" for name, n in found.kernels.items())
    total = sum(found.operand_bytes.values())
    dtypes = (f"{dtype} {n / total:.1%}" for dtype, n in found.operand_bytes.items())
    copies = [
        f"{one.share:.1%} of all bytes: {one.name} ({one.what})" for one in found.copies
    ]
    return [
        ("in place", in_place),
        ("kernels", kernels or "none: all is XLA's own"),
        ("operands", f"of products: {', '.join(dtypes) or 'none'}"),
        *[("copies", copy) for copy in copies or ["none above 1 % of all bytes"]],
    ]


def inspection_data(found: Inspection) -> dict[str, Any]:
    """Return what is found as plain values, with the sentences for the page."""
    values = asdict(found) | {"in_place": found.in_place._asdict()}
    return values | {"sentences": sentences(found)}


def print_inspection(found: Inspection) -> None:
    """Print what matters of a compiled step, and its largest buffers."""
    for name, text in sentences(found):
        print(f"{name:<11} {text}")
    rows = [
        [format_bytes(buffer.bytes), buffer.array, buffer.made, buffer.dies]
        for buffer in found.buffers
    ]
    headers = ["bytes", "array", "made by", "used last by"]
    print_table(rows, headers, "largest buffers besides the state (compiled)")
