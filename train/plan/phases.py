"""Plan the steps of a run whose batches change their shape."""

from collections.abc import Callable
from functools import partial
from typing import Any

from train.console import print_table
from train.plan.memory import Verdict
from train.plan.plan import Plan
from train.resolve.phases import phase_programs
from train.resolve.program import ConfiguredProgram, make_program
from train.units import format_bytes, format_seconds


def plan_phases(
    plan: Plan, make_plan: Callable[[ConfiguredProgram], Plan]
) -> list[dict[str, Any]]:
    """Return the shape, memory and time of the steps of each phase, as plain values.

    `plan` is for batches of `data.batch_size` rows, and `make_plan` returns the plan of
    another program. The time is None if the chip's rates are unknown.

    Raises:
        ConfigError: the batches of a phase cannot be divided among the devices.
    """
    program = plan.program
    devices = list(program.mesh.devices.flat)
    make = partial(make_program, devices=devices, num_tokens=program.num_tokens)
    programs = phase_programs(program, make)
    rows = list[dict[str, Any]]()
    for phase, phase_program in programs.items():
        phase_plan = plan if phase_program is program else make_plan(phase_program)
        rows.append(
            {
                "first_batch": phase.first_batch,
                "rows": phase.rows,
                "length": phase.length,
                "microbatches": phase_program.config.train.accumulation_steps,
                "needed": phase_plan.memory.needed.bytes,
                "fits": phase_plan.fits,
                "verdict": phase_plan.verdict._asdict(),
                "step_s": phase_plan.prediction and phase_plan.prediction.middle.step_s,
            }
        )
    return rows


def verdict_with_phases(verdict: Verdict, phases: list[dict[str, Any]]) -> Verdict:
    """Return a plan's verdict, or that of the first phase whose steps do not fit."""
    for phase in phases:
        if verdict.answer != "no" and not phase["fits"]:
            reason = f"from batch {phase['first_batch']:,} on "
            return Verdict("no", reason + phase["verdict"]["reason"])
    return verdict


def print_phases(phases: list[dict[str, Any]]) -> None:
    """Print a table of the phases."""
    rows = [
        [
            f"{phase['first_batch']:,}",
            f"{phase['rows']} x {phase['length']}",
            str(phase["microbatches"]),
            format_bytes(phase["needed"]),
            phase["verdict"]["answer"],
            "-" if phase["step_s"] is None else format_seconds(phase["step_s"]),
        ]
        for phase in phases
    ]
    headers = ["from batch", "rows x length", "microbatches", "needed", "fits"]
    headers += ["a step"]
    print_table(rows, headers, "phases")
