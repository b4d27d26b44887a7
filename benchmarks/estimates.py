"""Compare estimated with compiled plans: python -m benchmarks.estimates tpu (or gpu).

Each case is estimated and then compiled. This needs the compiler of the target but no
accelerator (`pip install -e ".[plan]"`, or `".[plan-gpu]"` for gpu). Case numbers as
further arguments select cases: `tpu 0 3`. On two idle cores, a case takes about a
minute for a TPU target and twenty seconds for a GPU target.

The program prints these ratios for each case:

arguments       compiled over estimated bytes of the state and the batch, which differ
                by the padding of a TPU's tiles
temporaries, FLOPs, memory (bytes read and written), speed (tokens/s)
                estimated over compiled
sent in layers  estimated over compiled bytes that a device sends for the layers

`tpu-remat` and `gpu-remat` run each of their cases with each rematerialisation policy
of train/plan/recomputing.py. If the compiled speeds of two policies differ by more than
5 %, the program prints whether the estimates have the same order.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from train.cli.command import compose
from train.hardware.devices import fake_devices, prepare
from train.hardware.targets import parse_target
from train.plan.config import PlanConfig
from train.plan.plan import Plan, compile_and_read, estimate
from train.plan.recomputing import POLICIES, format_policy
from train.resolve.program import ConfiguredProgram, make_program, settle
from train.units import format_bytes

GPT2 = "model=gpt2_124m data.sequence_length=1024"
LLAMA1 = "model=llama3_1b data.sequence_length=2048"
LLAMA8 = "model=llama3_8b model.num_layers=4 data.sequence_length=4096"
FULL = "train.remat=full"
DOTS = "train.remat=dots"
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
        f"v5e-8 {LLAMA1} mesh=fsdp mesh.context=4 {FULL} data.batch_size=8",
        f"v5e-8 {LLAMA1} mesh=fsdp mesh.pipeline=2 {FULL} data.batch_size=16",
    ],
    "gpu": [
        f"h100-8 {GPT2} mesh=ddp data.batch_size=64",
        f"h100-8 {GPT2} mesh=fsdp {FULL} {FOUR} data.batch_size=256",
        f"h100-8 {LLAMA1} mesh=fsdp {FULL} data.batch_size=32",
        f"h100-8 {LLAMA1} {TENSOR}2 {DOTS} data.batch_size=32",
        f"h100-8 {LLAMA8} mesh=fsdp optimizer=muon data.batch_size=16",
    ],
    "tpu-remat": [
        f"v5e-8 {GPT2} mesh=fsdp data.batch_size=64",
        f"v5e-16 {LLAMA1} mesh=fsdp data.batch_size=32",
        f"v5e-64 {LLAMA8} mesh=fsdp data.batch_size=64",
    ],
    "gpu-remat": [
        f"h100-8 {GPT2} mesh=fsdp data.batch_size=64",
        f"h100-8 {LLAMA1} mesh=fsdp data.batch_size=32",
        f"h100-8 {LLAMA8} mesh=fsdp data.batch_size=16",
    ],
}
_APART = 0.05


@dataclass(frozen=True)
class Compared:
    """Ratios by name, and the tokens/s that the estimated and compiled plans predict.

    Both speeds are 0 if XLA cannot print the compiled program.
    """

    ratios: dict[str, float]
    estimated: float
    compiled: float


def lay_out(case: str) -> ConfiguredProgram:
    """Return the program of a case on stand-ins for the devices of its target."""
    target, *overrides = case.split()
    base = ["optimizer=adamw", "tracker=none"]
    config = compose([*base, *overrides], "plan", PlanConfig)
    # 256, the size of a byte-level tokenizer, has no effect: these models set theirs.
    return make_program(settle(config, 256), fake_devices(parse_target(target)))


def compare(case: str) -> Compared | None:
    """Estimate and compile a case; print both, and return the comparison.

    Returns None if the compiled program does not fit into the devices' memory.
    """
    program = lay_out(case)
    start = time.perf_counter()
    guess = estimate(program)
    took = time.perf_counter() - start
    truth = compile_and_read(program)
    assert truth.compilation, "it was compiled"
    print(
        f"{case}\n    estimated in {took:.2f} s, compiled in "
        f"{truth.compilation.seconds:.0f} s"
    )
    if "temporaries" not in truth.memory.parts:
        print(f"    out of memory: {format_bytes(truth.memory.needed.bytes)}")
        return None
    ratios = {
        "arguments": truth.memory.parts["arguments"].bytes / guess.memory.held,
        "temporaries": _show("temporaries", guess, truth, _temporaries),
    }
    if truth.text is None:
        print("    its text cannot be had")  # jax 0.10, for some programs on v5p
        return Compared(ratios, 0.0, 0.0)
    ratios |= {
        "FLOPs": guess.cost.flops.total / truth.cost.flops.total,
        "memory": _show("memory", guess, truth, _moved),
        "speed": _speed(guess) / _speed(truth),
        "sent in layers": _in_layers(guess) / max(1.0, _in_layers(truth)),
    }
    print(f"    tokens/s {_speed(guess):,.0f}, compiled {_speed(truth):,.0f}")
    shown = ", ".join(f"{name} {ratio:.4f}" for name, ratio in ratios.items())
    print(f"    {shown}", flush=True)
    return Compared(ratios, _speed(guess), _speed(truth))


def _show(name: str, guess: Plan, truth: Plan, measure: Callable[[Plan], int]) -> float:
    estimated = measure(guess)
    compiled = measure(truth)
    print(f"    {name} {format_bytes(estimated)}, compiled {format_bytes(compiled)}")
    return estimated / compiled


def _temporaries(plan: Plan) -> int:
    return plan.memory.parts["temporaries"].bytes


def _moved(plan: Plan) -> int:
    return plan.cost.hbm_bytes.total


def _speed(plan: Plan) -> float:
    assert plan.prediction, "all targets' rates are known"
    return plan.prediction.middle.tokens_per_second


def _in_layers(plan: Plan) -> float:
    total = sum(row.sent for row in plan.cost.sent)
    return total - sum(row.sent for row in plan.cost.outside_layers)


def compare_policies(case: str) -> list[Compared]:
    """Compare a case under each rematerialisation policy, and their order in speed."""
    rows = {
        format_policy(policy): compare(f"{case} train.remat={format_policy(policy)}")
        for policy in POLICIES
    }
    comparisons = {remat: row for remat, row in rows.items() if row}
    for (a, one), (b, two) in itertools.combinations(comparisons.items(), 2):
        ratio = one.compiled / two.compiled
        if max(ratio, 1 / ratio) > 1 + _APART:
            agree = (one.estimated > two.estimated) == (ratio > 1)
            print(
                f"    {'same order' if agree else 'OTHER ORDER'}: {a} {ratio:.2f} x {b}"
            )
    return list(comparisons.values())


def main() -> None:
    """Compare the cases that the arguments select; print the errors of each ratio."""
    platform, *numbers = sys.argv[1:] or ["tpu"]
    jax.config.update("jax_platforms", "cpu")
    prepare()
    cases = CASES[platform]
    chosen = [cases[int(number)] for number in numbers] or cases
    if platform.endswith("-remat"):
        rows = [row.ratios for case in chosen for row in compare_policies(case)]
    else:
        rows = [row.ratios for case in chosen if (row := compare(case))]
    for name in dict.fromkeys(name for row in rows for name in row):
        errors = [abs(row[name] - 1) for row in rows if name in row]
        print(
            f"{name:16} median error {statistics.median(errors):.2%}, worst "
            f"{max(errors):.2%}, of {len(errors)}"
        )


if __name__ == "__main__":
    main()
