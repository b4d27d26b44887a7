"""Compare the estimate with the compilers: python -m benchmarks.estimates tpu (or gpu).

Each case is estimated, then compiled; no accelerator is needed, but the compiler is
(`pip install -e ".[plan]"`, or `".[plan-gpu]"` for gpu). Numbers behind choose cases.
About a minute each on TPU targets, twenty seconds on GPU ones, on two idle cores.

`arguments`: compiled over computed state and batch, which differ by what tiles pad.
`temporaries`, `FLOPs`, `memory`, `sent in layers`: estimated over compiled, the last
with the payloads of the layers' collectives.
"""

import statistics
import sys
import time
from typing import Any

import jax

from train.aot import OutOfMemory, measure_compile
from train.command import compose
from train.config import PlanConfig
from train.estimate import estimate_execution, estimate_memory
from train.execution import read_execution
from train.ledger import HELD, make_ledger
from train.loops import read
from train.program import Program, make_program, settle
from train.progress import format_bytes
from train.targets import parse_target
from train.topology import fake_devices, prepare

GPT2 = "model=gpt2_124m data.sequence_length=1024"
LLAMA1 = "model=llama3_1b data.sequence_length=2048"
LLAMA8 = "model=llama3_8b model.num_layers=4 data.sequence_length=4096"
FULL, DOTS = "train.remat=full", "train.remat=dots"
FOUR = "train.accumulation_steps=4"
TENSOR = "mesh=fsdp_tensor mesh.tensor="

CASES = {
    "tpu": [
        f"v5e-8 {GPT2} mesh=ddp data.batch_size=64",
        f"v5e-8 {GPT2} mesh=fsdp {DOTS} {FOUR} data.batch_size=256",
        f"v5e-8 {GPT2} mesh=fsdp optimizer=muon {FULL} data.batch_size=128",
        f"v5p-8 {GPT2} mesh=ddp optimizer=muon data.batch_size=64",
        f"v5e-16 {LLAMA1} mesh=fsdp {FULL} data.batch_size=32",
        f"v5e-16 {LLAMA1} {TENSOR}4 {DOTS} data.batch_size=16",
        f"v5e-8 {LLAMA1} {TENSOR}8 {FULL} data.batch_size=8",
        f"v5p-16 {LLAMA1} mesh=fsdp {FOUR} data.batch_size=128",
        f"v5e-16 {LLAMA1} mesh=fsdp optimizer=muon {FULL} {FOUR} data.batch_size=64",
        f"v5e-64 {LLAMA8} mesh=fsdp {FULL} data.batch_size=64",
        f"v5p-64 {LLAMA8} {TENSOR}2 optimizer=muon {DOTS} data.batch_size=64",
        f"v5p-128 {LLAMA8} mesh=fsdp data.batch_size=64",
    ],
    "gpu": [
        f"h100-8 {GPT2} mesh=ddp data.batch_size=64",
        f"h100-8 {GPT2} mesh=fsdp {FULL} {FOUR} data.batch_size=256",
        f"h100-8 {LLAMA1} mesh=fsdp {FULL} data.batch_size=32",
        f"h100-8 {LLAMA1} {TENSOR}2 {DOTS} data.batch_size=32",
        f"h100-8 {LLAMA8} mesh=fsdp optimizer=muon data.batch_size=16",
    ],
}


def lay_out(case: str) -> Program:
    """Lay a case out on its target."""
    target, *overrides = case.split()
    base = ["optimizer=adamw", "tracker=none"]
    config = compose([*base, *overrides], "plan", PlanConfig)
    # A byte-level tokenizer's 256 tokens; these models bring their own vocabulary.
    return make_program(settle(config, 256), fake_devices(parse_target(target)))


def compare(case: str) -> dict[str, float] | None:
    """Give the ratios of a case, and print them; None if it cannot be compiled."""
    program = lay_out(case)
    start = time.perf_counter()
    estimated, executed = estimate_memory(program), estimate_execution(program)
    took = time.perf_counter() - start
    compiled, cost = measure_compile(program)
    print(f"{case}\n    estimated in {took:.2f} s, compiled in {cost.seconds:.0f} s")
    if isinstance(compiled, OutOfMemory):
        print(f"    out of memory: {format_bytes(compiled.needed_bytes)}")
        return None
    real = make_ledger(program, compiled)
    held = sum(estimated.parts[name].bytes for name in HELD)
    guess, fact = (ledger.parts["temporaries"].bytes for ledger in (estimated, real))
    print(f"    temporaries {format_bytes(guess)}, compiled {format_bytes(fact)}")
    ratios = {
        "arguments": real.parts["arguments"].bytes / held,
        "temporaries": guess / fact,
    }
    try:
        truth = read_execution(program, read(compiled.as_text() or ""))
    except jax.errors.JaxRuntimeError as error:  # jax 0.10 on some programs for v5p
        truth = None
        print(f"    its text cannot be had: {str(error)[:70]}")
    if truth is not None:
        ratios |= {
            "FLOPs": executed.work.flops / truth.work.flops,
            "memory": executed.work.memory_bytes / truth.work.memory_bytes,
            "sent in layers": _in_layers(executed) / max(1.0, _in_layers(truth)),
        }
    shown = ", ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items())
    print(f"    {shown}", flush=True)
    return ratios


def _in_layers(executed: Any) -> float:
    every = sum(row.payload for row in executed.sent)
    return every - sum(row.payload for row in executed.outside_layers)


def main() -> None:
    """Compare the cases of a platform, or those with the numbers that follow."""
    platform, *numbers = sys.argv[1:] or ["tpu"]
    jax.config.update("jax_platforms", "cpu")
    prepare()
    cases = CASES[platform]
    chosen = [cases[int(number)] for number in numbers] or cases
    rows = [ratios for case in chosen if (ratios := compare(case))]
    for name in dict.fromkeys(name for row in rows for name in row):
        errors = [abs(row[name] - 1) for row in rows if name in row]
        print(
            f"{name:16} median error {statistics.median(errors):.2%}, worst "
            f"{max(errors):.2%}, of {len(errors)}"
        )


if __name__ == "__main__":
    main()
