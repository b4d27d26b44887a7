"""Write the texts of a compiled step to files, and print its summary."""

from dataclasses import asdict
from typing import Any

from etils import epath

from data.storage import write_atomically
from train.console import print_table
from train.plan.aot import lower_step
from train.plan.compiled.inspection import Inspection
from train.program import Program
from train.units import format_bytes

_MAX_NAMED = 3  # arrays named in the sentence about updates in place


def write_texts(program: Program, text: str, folder: epath.Path) -> list[str]:
    """Write the traced, lowered and optimized step, and return the file names.

    `text` is the optimized HLO. The folder must exist.
    """
    traced, lowered = lower_step(program)
    texts = {
        "step.jaxpr": str(traced.jaxpr),
        "step.stablehlo": lowered.as_text(),
        "step.hlo": text,
    }
    for name, content in texts.items():
        write_atomically(folder / name, content + "\n")
    return list(texts)


def sentences(inspection: Inspection) -> list[tuple[str, str]]:
    """Return the summary of a compiled step as pairs of a title and a sentence."""
    updated, others = inspection.in_place.updated, inspection.in_place.others
    in_place = f"all {len(updated)} arrays of the state are updated in place"
    if others:
        examples = ", ".join(others[:_MAX_NAMED]) + ", ..." * (len(others) > _MAX_NAMED)
        in_place = f"{len(updated)} of {len(updated + others)} arrays of the state are "
        in_place += f"updated in place, but not {examples}"
    kernels = ", ".join(f"{name} {n} x" for name, n in inspection.kernels.items())
    return [
        ("in place", in_place),
        ("kernels", kernels or "none; XLA generated all code itself"),
    ]


def inspection_data(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as plain values, with its sentences for the page."""
    return asdict(inspection) | {"sentences": sentences(inspection)}


def print_inspection(inspection: Inspection) -> None:
    """Print the summary of a compiled step and its largest buffers."""
    for name, text in sentences(inspection):
        print(f"{name:<11} {text}")
    rows = [[format_bytes(b.bytes), b.array, b.made] for b in inspection.buffers]
    title = "largest buffers besides the state (compiled)"
    print_table(rows, ["bytes", "array", "made by"], title)
