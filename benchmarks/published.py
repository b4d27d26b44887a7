"""Compare predicted with published speeds of training runs.

    python -m benchmarks.published [--rows a,b] [--estimated | --fresh | --kept]
        [--json file]

A row of published_*.json is one published run, described by keys of `python -m
train.plan`; `differs` names what the keys cannot express. The program compiles the step
for the row's machine, or estimates it (`--estimated`), and predicts its speed.
Constants of train/hardware/achievable.py are fitted to the rows with the use "settled
on"; the rows with the use "judged by" validate them. The costs of compiled steps are
cached in ~/.cache/longhaul/published_costs. A row that is not in the cache is skipped
with a message if its compiler is not installed. MFU follows train/core/model_flops.py,
also for published speeds.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.published_rows import TABLES, Row, read_rows
from data.machine import cache_folder
from train.cli.command import compose
from train.config import Platform
from train.console import print_table
from train.hardware.chips import Chip
from train.hardware.devices import fake_devices, missing_compiler, prepare
from train.hardware.targets import parse_target
from train.plan.config import PlanConfig
from train.plan.cost import CollectiveTotal, Flops, HbmBytes, SectionCost, StepCost
from train.plan.estimated.step import estimate_step
from train.plan.plan import compile_and_read, is_confirmed
from train.plan.roofline import predict
from train.plan.scaling import ScalingPoint, weak_scaling
from train.resolve.program import ConfiguredProgram, make_program, settle
from train.run.versions import versions
from train.runtime import set_up

_LIBRARIES = ("jax", "libtpu", "jax-cuda13-plugin")


def main() -> None:
    """Predict the speed of the chosen rows, and print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", help="parts of names, with commas between")
    parser.add_argument("--estimated", action="store_true", help="without a compiler")
    parser.add_argument("--fresh", action="store_true", help="compile again")
    parser.add_argument("--kept", action="store_true", help="compile nothing")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    wanted = (options.rows or "").lower().split(",")
    results = []
    for row in [row for table in TABLES.values() for row in read_rows(table)]:
        if any(part in row.name.lower() for part in wanted):
            step_cost = executed(row, options.fresh, options.kept, options.estimated)
            if step_cost:
                results.append(compare(row, step_cost))
                if options.json:
                    write(results[-1], options.json)
    report(results)


class Found(NamedTuple):
    """The cost of a row's step, and the program and the chip that it is for."""

    cost: StepCost
    program: ConfiguredProgram
    chip: Chip


def executed(
    row: Row, fresh: bool = False, only_kept: bool = False, estimated: bool = False
) -> Found | None:
    """Return the cost of a row's step: estimated, from the cache, or compiled.

    `fresh` ignores the cache, and `only_kept` compiles nothing. If there is no cost,
    the function prints the reason to stderr and returns None.
    """
    overrides = (*row.overrides, "optimizer=adamw", "tracker=none")
    config = compose(overrides, "plan", PlanConfig)
    target = parse_target(config.target)
    set_up(dataclasses.replace(config.runtime, platform=Platform.cpu))
    prepare()
    settled = settle(config, config.model.vocab_size)
    program = make_program(settled, fake_devices(target))
    chip = chip_of(row, target.chip)
    if estimated:
        return Found(estimate_step(program), program, chip)
    file = _kept(row.overrides)
    if file.exists() and not fresh:
        return Found(cost_of(json.loads(file.read_text())), program, chip)
    missing = "not compiled yet" if only_kept else missing_compiler(target)
    execution = missing or execution_of(program)
    if isinstance(execution, str):
        print(f"left out: {row.name}: {execution}", file=sys.stderr)
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(execution.as_json()))
    return Found(execution, program, chip)


def cost_of(values: dict[str, Any]) -> StepCost:
    """Return the `StepCost` from the values that `StepCost.as_json` returned."""

    def totals(rows: list[dict[str, Any]]) -> list[CollectiveTotal]:
        return [CollectiveTotal(**{**row, "axes": tuple(row["axes"])}) for row in rows]

    def section(row: dict[str, Any]) -> SectionCost:
        flops = {**row["flops"], "unknown": tuple(row["flops"]["unknown"])}
        flops.setdefault("grouped_tiles", flops.get("grouped", 0.0))
        hbm_bytes = HbmBytes(**row["hbm_bytes"])
        return SectionCost(row["name"], Flops(**flops), hbm_bytes, totals(row["sent"]))

    rows = values.get("sections")
    if rows is None:  # Results of 25 November 2026 and earlier have no sections.
        flops = dict(values["work"])
        products = flops.pop("product_bytes")
        all_bytes = flops.pop("memory_bytes")
        hbm_bytes = {"products": products, "others": all_bytes - products}
        section_values = {"name": "step", "flops": flops, "hbm_bytes": hbm_bytes}
        rows = [{**section_values, "sent": values["sent"]}]
    return StepCost(
        model_flops=values["model_flops"],
        sections=tuple(map(section, rows)),
        outside_layers=totals(values["outside_layers"]),
        host_bytes=values.get("host_bytes", 0),
        unread=tuple(values["unread"]),
        how=values["how"],
    )


def chip_of(row: Row, chip: Chip) -> Chip:
    """Return `chip` with the rates that `row.chip` replaces."""
    kernels = {k: v for k, v in row.chip.items() if k in ("attention", "grouped")}
    other_rates = {k: v for k, v in row.chip.items() if k not in kernels}
    achievable = dataclasses.replace(chip.achievable, **kernels)
    return dataclasses.replace(chip, achievable=achievable, **other_rates)


def platform_of(chip: Chip) -> str:
    """Return the group of a chip in the summary: TPU, GPU or B200.

    B200 has the constants of H100, so no row may count for both.
    """
    if chip.matrix_unit:
        return "TPU"
    return "B200" if chip.kind == "B200" else "GPU"


def execution_of(program: ConfiguredProgram) -> StepCost | str:
    """Compile a program and return its cost, or the reason why there is none."""
    plan = compile_and_read(program)
    if plan.text is None and plan.fits:
        return "XLA cannot print the program"
    if plan.text is None:
        needed = plan.memory.needed.bytes
        available = plan.budget.available
        return f"it does not fit: {needed / 2**30:.1f} of {available / 2**30:.1f} GiB"
    if plan.compilation:
        print(f"compiled in {plan.compilation.seconds:.0f} s", file=sys.stderr)
    return plan.cost


def compare(row: Row, step_cost: Found) -> dict[str, Any]:
    """Return the predicted and published values of a row, with the same MFU convention.

    `error` is the relative error of the predicted seconds per step.
    """
    model = step_cost.program.config.model
    data = step_cost.program.config.data
    mesh = step_cost.program.mesh
    chip = step_cost.chip
    prediction = predict(step_cost.cost, model, data, mesh=mesh, chip=chip)
    predictions = list[ScalingPoint]()
    if row.kept:
        slice_counts = [number for number, _ in row.kept]
        predictions = weak_scaling(
            step_cost.cost,
            model,
            data,
            mesh=mesh,
            chip=chip,
            slice_counts=slice_counts,
        )
    chips = prediction.chips
    tokens = prediction.tokens
    flops_per_token = prediction.model_flops * prediction.devices / tokens
    rate = row.tokens or (row.flops or 0.0) / flops_per_token
    published = prediction.speed_at(tokens / chips / rate)
    step = prediction.step_s
    middle = prediction.middle
    cost = step_cost.cost.as_json()
    mfu = prediction.range("mfu")
    del cost["outside_layers"]
    return {
        "name": row.name,
        "source": row.source,
        "date": row.date,
        "use": row.use,
        "platform": platform_of(step_cost.chip),
        "differs": row.differs,
        "overrides": row.overrides,
        "how": prediction.how,
        "published": dataclasses.asdict(published),
        "step_s": dataclasses.asdict(step) | {"middle": middle.step_s},
        "mfu": dataclasses.asdict(mfu) | {"middle": middle.mfu},
        "error": middle.step_s / published.step_s - 1,
        "stated": is_confirmed(step_cost.cost, mesh),
        "in_range": step.low <= published.step_s <= step.high,
        "kept": row.kept,
        "kept_predicted": [n.efficiency.middle for n in predictions],
        "versions": versions(_LIBRARIES),
        "cost": cost,
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result to a JSON file with one result per line.

    The new result replaces one with the same name and `how` (compiled or estimated).
    """
    rows = json.loads(path.read_text()) if path.exists() else []
    is_same = [
        (row["name"], row["how"]) == (result["name"], result["how"]) for row in rows
    ]
    if any(is_same):
        rows[is_same.index(True)] = result
    else:
        rows.append(result)
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def report(results: list[dict[str, Any]]) -> None:
    """Print a table of the results, error summaries, scaling and differences."""
    rows = [
        [
            result["name"],
            result["use"],
            f"{result['published']['step_s']:.2f}",
            f"{result['step_s']['low']:.2f} to {result['step_s']['high']:.2f}",
            f"{result['error']:+.0%}",
            f"{result['published']['mfu']:.1%}",
            f"{result['mfu']['low']:.1%} to {result['mfu']['high']:.1%}",
            ("yes" if result["in_range"] else "no")
            + ("" if result["stated"] else ", not stated"),
        ]
        for result in results
    ]
    headers = ["run", "", "s a step", "predicted", "error of the middle", "MFU"]
    headers += ["predicted", "in range"]
    print_table(rows, headers, "published runs (MFU: 6N + 12LCT, causal not halved)")
    for kind in itertools.product(("TPU", "GPU", "B200"), ("settled on", "judged by")):
        errors = [r for r in results if (r["platform"], r["use"]) == kind]
        if errors:
            print(f"{' '.join(kind)}: {_summary(errors)}")
    for result in results:
        for (n, speed), predicted in zip(
            result["kept"], result["kept_predicted"], strict=True
        ):
            print(
                f"{result['name']}: {n} slices keep {speed:.1%} of one's speed, "
                f"predicted {predicted:.1%}, {predicted - speed:+.1%}"
            )
    for result in results:
        print(
            f"{result['name']}: {result['source']}; not the same: {result['differs']}"
        )


def _summary(results: list[dict[str, Any]]) -> str:
    sizes = [abs(result["error"]) for result in results]
    return (
        f"{sum(result['in_range'] for result in results)} of {len(results)} in range, "
        f"{sum(size <= 0.2 for size in sizes)} within 20 % of the middle, "
        f"{statistics.mean(sizes):.0%} off on average, "
        f"{statistics.mean(result['error'] for result in results):+.0%} with its sign"
    )


def _kept(overrides: tuple[str, ...]) -> Path:
    key = hashlib.sha256(" ".join(overrides).encode()).hexdigest()[:16]
    return cache_folder() / "published_costs" / f"{key}.json"


if __name__ == "__main__":
    main()
