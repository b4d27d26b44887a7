"""Write the texts of a compiled step to files, and print its summary."""

from etils import epath

from data.storage import write_atomically
from train.console import print_table
from train.core.program import Program
from train.plan.advice import print_texts
from train.plan.aot import lower_step
from train.plan.compiled.inspection import Inspection
from train.units import format_bytes


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
    updated = inspection.in_place.updated
    others = inspection.in_place.others
    in_place = f"{len(updated)} of {len(updated + others)} arrays of the state are "
    in_place += "updated in place"
    if others:
        in_place += f", but not, for example, {', '.join(others[:3])}"
    kernels = ", ".join(f"{name} {n} x" for name, n in inspection.kernels.items())
    return [
        ("in place", in_place),
        ("kernels", kernels or "none; XLA generated all code itself"),
    ]


def print_inspection(inspection: Inspection) -> None:
    """Print the summary of a compiled step and its largest buffers."""
    print_texts(sentences(inspection))
    rows = [[format_bytes(b.bytes), b.array, b.made] for b in inspection.buffers]
    title = "largest buffers besides the state (compiled)"
    print_table(rows, ["bytes", "array", "made by"], title)
