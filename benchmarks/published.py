"""Predictions beside published runs.

    python -m benchmarks.published [--rows a,b] [--fresh | --kept] [--json file]

Each row is expressed by keys of `python -m train.plan` as nearly as they can (`differs`
says what they cannot), compiled for its machine by the real compiler, and predicted;
nothing is tuned to any of them. What was compiled lies in ~/.cache/longhaul/published;
rows whose compiler is neither installed nor was ever needed are left out, loudly.
MFU is in this project's convention (train/program.py), whatever the source's own.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from benchmarks.published_rows import ROWS, Row
from data.machine import cache_folder
from model.config import ModelConfig
from train.cli.command import compose
from train.config import Platform
from train.console import print_table
from train.hardware.chips import Chip
from train.hardware.devices import fake_devices, missing_compiler, prepare
from train.hardware.targets import parse_target
from train.plan.aot import OutOfMemory, measure_compile
from train.plan.compiled.step import read_step
from train.plan.config import PlanConfig
from train.plan.cost import StepCost
from train.plan.roofline import predict
from train.plan.scaling import weak_scaling
from train.program import Program, make_program, settle
from train.runtime import set_up


def main() -> None:
    """Compile what is not kept yet, predict, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", help="parts of names, with commas between")
    parser.add_argument("--fresh", action="store_true", help="compile again")
    parser.add_argument("--kept", action="store_true", help="compile nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = (options.rows or "").lower().split(",")
    results = []
    for row in ROWS:
        if any(part in row.name.lower() for part in wanted):
            found = executed(row, options.fresh, options.kept)
            if found:
                results.append(compare(row, found))
    report(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


class Found(NamedTuple):
    """What a row's step does, and where."""

    cost: StepCost
    program: Program
    chip: Chip

    @property
    def arguments(self) -> tuple[StepCost, Mesh, Chip, ModelConfig, int]:
        """Those of `predict`."""
        tokens, model = self.program.tokens_per_step, self.program.config.model
        return self.cost, self.program.mesh, self.chip, model, tokens


def executed(row: Row, fresh: bool = False, only_kept: bool = False) -> Found | None:
    """Have a row compiled; None, and said on stderr, if it cannot be."""
    overrides = (*row.overrides, "optimizer=adamw", "tracker=none")
    config = compose(overrides, "plan", PlanConfig)
    target = parse_target(config.target)
    set_up(dataclasses.replace(config.runtime, platform=Platform.cpu))
    prepare()
    settled = settle(config, config.model.vocab_size)
    program = make_program(settled, fake_devices(target))
    kept = _kept(row.overrides)
    if kept.exists() and not fresh:
        return Found(
            StepCost.from_json(json.loads(kept.read_text())), program, target.chip
        )
    missing = "not compiled yet" if only_kept else missing_compiler(target)
    execution = missing or execution_of(program)
    if isinstance(execution, str):
        print(f"left out: {row.name}: {execution}", file=sys.stderr)
        return None
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(execution.as_json()))
    return Found(execution, program, target.chip)


def execution_of(program: Program) -> StepCost | str:
    """Compile a program and read it; else say why not."""
    compiled, cost = measure_compile(program)
    if isinstance(compiled, OutOfMemory):
        needed, there = compiled.needed_bytes / 2**30, compiled.available_bytes / 2**30
        return f"it does not fit: {needed:.1f} of {there:.1f} GiB"
    print(f"compiled in {cost.seconds:.0f} s", file=sys.stderr)
    try:
        return read_step(program, compiled.as_text() or "")
    except jax.errors.JaxRuntimeError as error:
        return f"XLA cannot print the program: {str(error).splitlines()[0]}"


def compare(row: Row, found: Found) -> dict[str, Any]:
    """Put a prediction beside what was published, in the same convention."""
    prediction = predict(*found.arguments)
    scaled = (
        weak_scaling(*found.arguments, [n for n, _ in row.kept]) if row.kept else []
    )
    chips, tokens = prediction.chips, prediction.tokens
    flops_per_token = prediction.model_flops * prediction.devices / tokens
    rate = row.tokens or (row.flops or 0.0) / flops_per_token
    published = prediction.at(tokens / chips / rate)
    return {
        **dataclasses.asdict(row),
        "platform": "TPU" if found.chip.matrix_unit else "GPU",
        "kept_predicted": [dataclasses.asdict(n.efficiency) for n in scaled],
        "published": dataclasses.asdict(published),
        "predicted": prediction.as_json(),
        "error": prediction.step_s.middle / published.step_s - 1,
        "in_range": prediction.step_s.low <= published.step_s <= prediction.step_s.high,
    }


def report(results: list[dict[str, Any]]) -> None:
    """Print one line a row, and what is not the same."""
    rows = []
    for found in results:
        published, predicted = found["published"], found["predicted"]
        step, mfu = predicted["step_s"], predicted["mfu"]
        rows.append(
            [
                found["name"],
                f"{published['step_s']:.2f}",
                f"{step['low']:.2f} to {step['high']:.2f}",
                f"{found['error']:+.0%}",
                f"{published['mfu']:.1%}",
                f"{mfu['low']:.1%} to {mfu['high']:.1%}",
                f"{predicted['middle']['mfu']:.1%}",
                "yes" if found["in_range"] else "no",
            ]
        )
    headers = ["run", "s a step", "predicted", "error of the middle", "MFU"]
    headers += ["predicted", "middle", "in range"]
    print_table(rows, headers, "published runs (MFU: 6N + 12LCT, causal not halved)")
    for platform in ("TPU", "GPU"):
        errors = [r["error"] for r in results if r["platform"] == platform]
        if errors:
            mean = sum(errors) / len(errors)
            size = sum(map(abs, errors)) / len(errors)
            inside = sum(r["in_range"] for r in results if r["platform"] == platform)
            print(
                f"{platform}: {inside} of {len(errors)} in range; the middle step time "
                f"is off by {size:.0%} on average, {mean:+.0%} with its sign"
            )
    for found in results:
        for (n, kept), by in zip(found["kept"], found["kept_predicted"], strict=True):
            print(
                f"{found['name']}: {n} slices keep {kept:.1%} of one's speed, "
                f"predicted {by['low']:.1%} to {by['high']:.1%}"
            )
    for found in results:
        print(f"{found['name']}: {found['source']}; not the same: {found['differs']}")


def _kept(overrides: tuple[str, ...]) -> Path:
    key = hashlib.sha256(" ".join(overrides).encode()).hexdigest()[:16]
    return cache_folder() / "published" / f"{key}.json"


if __name__ == "__main__":
    main()
