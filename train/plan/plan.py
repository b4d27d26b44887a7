"""What a program would do on its devices: memory, work, traffic, speed.

Compiled where the devices' compiler is at hand, else estimated from shapes.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from train.config import Remat
from train.hardware.chips import chip_of
from train.hardware.interconnect import NotStated
from train.plan.advice import Advice, advise
from train.plan.aot import Cost, OutOfMemory, measure_compile
from train.plan.compiled.hlo import Module
from train.plan.compiled.step import read_step
from train.plan.compiled.trip_counts import read
from train.plan.cost import StepCost
from train.plan.estimated.step import (
    estimate_items,
    estimate_memory,
    estimate_step,
)
from train.plan.fit import make_room
from train.plan.memory import Ledger, Room, make_ledger
from train.plan.prediction import Prediction
from train.plan.roofline import predict
from train.plan.scaling import Scaled, num_slices, weak_scaling
from train.program import Program


@dataclass(frozen=True)
class Outlook:
    """Of one step of one device.

    prediction: None where nobody says how fast the machine is (any CPU).
    unpredicted: why there is none.
    module: the compiled program; None: it was not compiled, or found to be too large.
    cost: of compiling.
    """

    ledger: Ledger
    execution: StepCost
    prediction: Prediction | None
    module: Module | None = None
    cost: Cost | None = None
    unpredicted: str = ""

    def advise(self, program: Program, room: Room) -> Advice | None:
        """Name the bottleneck of a step, memory if it does not fit, and a remedy."""
        if self.prediction is None or self.ledger.needed is None:
            return None
        spare = room.available - self.ledger.needed.bytes
        if spare < 0:
            return make_room(program, self.ledger, room)
        advice = advise(self.prediction, program.config, program.mesh, spare)
        key, _, remat = advice.override.partition("=")
        if key == "train.remat" and not _fits_with(program, remat, room):
            change = "recomputing less does not fit, but with other meshes may"
            return replace(advice, change=change, override="search=true")
        return advice

    def scaled(self, program: Program) -> list[Scaled]:
        """Predict what more slices give; [] for a single one."""
        chip = chip_of(program.mesh.devices.flat[0].device_kind)
        several = num_slices(program.mesh.devices.flat) > 1
        if chip is None or self.prediction is None or not several:
            return []
        model, tokens = program.config.model, program.tokens_per_step
        return weak_scaling(self.execution, program.mesh, chip, model, tokens)

    def as_json(self, program: Program, room: Room) -> dict[str, Any]:
        """Give all figures as plain values."""
        advice, prediction = self.advise(program, room), self.prediction
        return {
            **self.ledger.as_json(),
            "compile": self.cost and asdict(self.cost),
            "execution": self.execution.as_json(),
            "prediction": prediction and prediction.as_json(),
            "advice": advice and asdict(advice),
            "weak_scaling": [asdict(row) for row in self.scaled(program)],
        }


def _fits_with(program: Program, remat: str, room: Room) -> bool:
    """Estimate whether another policy of recomputation fits."""
    other = program.trained(replace(program.config.train, remat=Remat(remat)))
    return estimate_memory(other).fits(room) is True


def estimate(program: Program) -> Outlook:
    """Look ahead by shapes alone, in milliseconds."""
    return _outlook(program, estimate_memory(program), estimate_step(program))


def compile_and_read(program: Program) -> Outlook:
    """Look ahead by compiling the step, and reading what came of it.

    What does not fit, or cannot be printed by XLA, leaves nothing to read: work and
    speed are estimated.
    """
    result, cost = measure_compile(program)
    ledger, text = make_ledger(program, result), None
    ledger = replace(ledger, temporaries=estimate_items(program))
    if not isinstance(result, OutOfMemory):
        # XLA of jax 0.10 cannot print some programs for v5p and v6e.
        with suppress(jax.errors.JaxRuntimeError):
            text = result.as_text()
    cost_of_step = read_step(program, text) if text else estimate_step(program)
    module = read(text) if text else None
    return replace(_outlook(program, ledger, cost_of_step), module=module, cost=cost)


def _outlook(program: Program, ledger: Ledger, execution: StepCost) -> Outlook:
    kind = program.mesh.devices.flat[0].device_kind
    chip = chip_of(kind)
    if chip is None:
        return Outlook(
            ledger, execution, None, unpredicted=f"the speed of {kind} is not known"
        )
    model, tokens = program.config.model, program.tokens_per_step
    try:
        prediction = predict(execution, program.mesh, chip, model, tokens)
    except NotStated as error:
        return Outlook(ledger, execution, None, unpredicted=str(error))
    return Outlook(ledger, execution, prediction)
