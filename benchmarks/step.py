"""Compare the speed of training steps of PyTorch and Longhaul.

    python -m benchmarks.step --preset nano --json nano.json
    python -m benchmarks.step --preset gpt2_124m --device gpu
    python -m benchmarks.step --isa avx2    # float32, as on a CPU without AVX-512

Each contender is a separate process. All train a model of the same shape on the same
batches, which are already on the device. Before the timing, each contender's loss must
fall and agree with the first contender's. A short run eliminates all but the two
fastest PyTorch variants. The others then run blocks of steps alternately, so that other
load on the machine affects all of them equally.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    Contender,
    alternate,
    check,
    print_rows,
    rows_of,
    setting,
)
from benchmarks.step_worker import PRESETS, Spec
from data.machine import usable_cores
from train.hardware.chips import peak_flops

TORCH_KEPT = 2  # the number of PyTorch variants in the long run
# Variants: compiled or eager, bfloat16 autocast or float32, and PyTorch's attention
# kernel or attention as products and a softmax ("written"), which is faster on a CPU
# for short rows.
TORCH_VARIANTS = [
    f"torch-{mode}-{precision}{attention}"
    for mode in ("eager", "compile")
    for precision in ("f32", "bf16")
    for attention in ("", "-written")
]
# On a GPU the compiled bfloat16 variant is known to be the fastest of the PyTorch
# variants, and the GPU's memory is too small for all eight together.
DEFAULT_CONTENDERS = {
    "cpu": [*TORCH_VARIANTS, "longhaul"],
    "gpu": ["torch-compile-bf16", "longhaul"],
}


# Environment variables that restrict each library to an older instruction set.
NARROW = {
    "avx2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}


def prune(contenders: list[Contender], steps: int) -> list[Contender]:
    """End all but the fastest PyTorch variants; return the remaining contenders."""
    alternate(contenders, 4, steps)
    by_time = sorted(contenders, key=lambda c: statistics.median(c.blocks))
    torch_names = [c.name for c in by_time if c.name in TORCH_VARIANTS]
    dropped = torch_names[TORCH_KEPT:]
    for contender in by_time:
        step_ms = 1e3 * statistics.median(contender.blocks)
        fate = ", dropped" if contender.name in dropped else ""
        print(f"short run: {contender.name} {step_ms:.2f} ms{fate}", flush=True)
        if fate:
            contender.quit()
    return [c for c in contenders if c.name not in dropped]


def spec_of(name: str, options: argparse.Namespace, isa: str | None) -> Spec:
    """Return the spec of a contender; `isa` is a key of NARROW, or None."""
    return Spec(
        *(name, options.preset, options.device, options.threads),
        float32=isa is not None,
        environment=NARROW[isa] if isa else {},
    )


def check_narrow(options: argparse.Namespace, names: list[str]) -> dict[str, float]:
    """Check that `--isa` slows down a float32 product in each library.

    Returns:
        The speed with the restriction divided by the speed without, by library. If
        this ratio is near 1, the library may ignore the restriction, or may not use
        the excluded instructions anyway.
    """
    first = {name.partition("-")[0]: name for name in reversed(names)}
    ratios = {}
    for library, name in first.items():
        pair = [Contender(spec_of(name, options, isa)) for isa in (None, options.isa)]
        speeds = [[c.ask("product")["flops"] for c in pair] for _ in range(5)]
        for contender in pair:
            contender.quit()
        wide, narrow = (statistics.median(flops) for flops in zip(*speeds, strict=True))
        ratios[library] = narrow / wide
        verdict = "narrower" if narrow < 0.8 * wide else "nothing tells it is narrower"
        print(
            f"{library}: a float32 product at {wide / 1e9:.0f} GFLOP/s, with "
            f"{options.isa} at {narrow / 1e9:.0f}: {verdict}",
            flush=True,
        )
    return ratios


def report(contenders: list[Contender], options: argparse.Namespace) -> dict[str, Any]:
    """Print the settings and the table of results; return both as plain values."""
    result = setting(contenders[0].spec)
    result["rows"] = rows_of(contenders, peak_flops(result["hardware"]))
    for key in ("date", "hardware", "threads", "versions", "shape"):
        print(f"{key}: {result[key]}")
    print_rows(result["rows"], options.device)
    return result


def main() -> None:
    """Check the contenders, end the slow ones, time the others and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="nano")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--contenders", help="names with commas between")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="of one block")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", choices=NARROW, help="compute in float32 with no more")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = DEFAULT_CONTENDERS[options.device]
    if options.isa:  # The restricted runs compute in float32.
        names = [name for name in names if "bf16" not in name]
    if options.contenders:
        names = options.contenders.split(",")
    if unknown := set(names) - {*TORCH_VARIANTS, "longhaul"}:
        parser.error(f"--contenders: unknown {sorted(unknown)}")
    ratios = check_narrow(options, names) if options.isa else None
    contenders = [Contender(spec_of(name, options, options.isa)) for name in names]
    try:
        contenders = prune(check(contenders), options.steps)
        alternate(contenders, options.blocks, options.steps)
        result = report(contenders, options)
        result["narrow"] = {"isa": options.isa, "product": ratios}
    finally:
        for contender in contenders:
            contender.quit()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
