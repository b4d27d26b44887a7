"""Plan a step on its devices: memory, cost, predicted speed and advice.

`compile_and_read` compiles the step, `compile_small` a copy with few layers, and
`estimate` nothing.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import jax

from train.hardware.chips import Chip, chip_of
from train.hardware.interconnect import NotStated
from train.model_flops import attention_flops
from train.plan.advice import Advice, advise
from train.plan.aot import Compilation, OutOfMemory, measure_compile
from train.plan.budget import MemoryBudget, memory_budget, memory_limit
from train.plan.compiled.step import read_step
from train.plan.cost import StepCost
from train.plan.estimated.local_step import local_step
from train.plan.estimated.step import (
    estimate_memory,
    estimate_step,
    temporaries_by_depth,
)
from train.plan.fit import make_fit
from train.plan.memory import DeviceMemory, device_memory
from train.plan.recomputing import format_policy, policies_keeping_more
from train.plan.roofline import Prediction, predict
from train.plan.scaling import ScalingPoint, weak_scaling
from train.plan.small_copy import extrapolate_cost, extrapolate_memory, make_copy
from train.program import Program
from train.units import format_flops

_MIN_COUNTED = 0.98  # A plan that counts less of the needed FLOPs has a bug.


class ImpossibleCost(Exception):
    """The planner counted fewer FLOPs than the model needs, which is a planner bug."""


@dataclass(frozen=True)
class Plan:
    """The plan of one step, with figures for one device.

    program: the planned program.
    budget: the memory that a device can give the step.
    memory: the memory that the step needs.
    cost: the step's FLOPs, bytes and collectives.
    text: the optimized HLO; None if there is no compiled program to read.
    compilation: the time and host memory of compiling; None if it was not tried.
    """

    program: Program
    budget: MemoryBudget
    memory: DeviceMemory
    cost: StepCost
    text: str | None = None
    compilation: Compilation | None = None

    @property
    def fits(self) -> bool:
        """Whether the step fits into the available memory of a device."""
        return self.memory.fits(self.budget)

    @property
    def prediction(self) -> Prediction | None:
        """The predicted speed; None if the chip's rates are unknown (always on CPU)."""
        return self._predicted if isinstance(self._predicted, Prediction) else None

    @property
    def missing_prediction(self) -> str:
        """The reason why there is no prediction; "" if there is one."""
        return "" if isinstance(self._predicted, Prediction) else self._predicted

    @property
    def _chip(self) -> Chip | None:
        return chip_of(self.program.mesh.devices.flat[0].device_kind)

    @cached_property
    def _predicted(self) -> Prediction | str:
        """The predicted speed, or the reason why there is no prediction.

        Raises:
            ImpossibleCost: if fewer FLOPs were counted than the model needs.
        """
        program, chip = self.program, self._chip
        if chip is None:
            kind = program.mesh.devices.flat[0].device_kind
            return f"the speed of {kind} is not known"
        config, tokens = program.config, program.tokens_per_step
        attention = attention_flops(config.model, config.data.sequence_length)
        # Model FLOPs count all of causal attention (train/model_flops.py), but causal
        # kernels skip half of it.
        needed = program.flops_per_step - tokens * attention / 2
        computed = self.cost.flops.total * program.mesh.size
        if computed < _MIN_COUNTED * needed and not self.cost.flops.unknown:
            raise ImpossibleCost(
                f"the {self.cost.how} step computes {format_flops(computed)}, but the "
                f"model needs at least {format_flops(needed)}. Its MFU would be higher "
                "than matrix products can reach. This is a bug of train.plan."
            )
        try:
            return predict(self.cost, program.config, program.mesh, chip)
        except NotStated as error:
            return str(error)

    @cached_property
    def advice(self) -> Advice | None:
        """The bottleneck and its remedy; None if the step fits but has no prediction.

        The bottleneck is memory if the step does not fit.
        """
        spare = self.budget.available - self.memory.needed.bytes
        if spare < 0:
            has_prediction = self.prediction is not None
            return make_fit(
                self.program, self.memory, self.budget, searchable=has_prediction
            )
        if self.prediction is None:
            return None
        config, mesh = self.program.config, self.program.mesh
        advice = advise(self.prediction, config, mesh, spare)
        if not advice.override.startswith("train.remat="):
            return advice
        step_times = dict[str, float]()  # seconds, by override
        for policy in policies_keeping_more(config.train.remat, config.train.offload):
            train = replace(config.train, remat=policy)
            other_plan = estimate(self.program.with_train_config(train), self.budget)
            if other_plan.fits:
                step_times[f"train.remat={format_policy(policy)}"] = _step_s(other_plan)
        if not step_times:
            change = "recomputing less does not fit here, but may on another mesh"
            return replace(advice, change=change, override="search=true")
        best = min(step_times, key=step_times.__getitem__)
        if step_times[best] >= _step_s(estimate(self.program, self.budget)):
            change = "recomputing less fits, but is estimated to be no faster"
            return replace(advice, change=change, override="")
        return replace(advice, override=best)

    @cached_property
    def scaling(self) -> list[ScalingPoint]:
        """Predictions by number of slices; [] for one, or if the step does not fit."""
        program, chip = self.program, self._chip
        if chip is None or self.prediction is None or not self.fits:
            return []
        return weak_scaling(self.cost, program.config, program.mesh, chip)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values, under the keys of plan.json.

        The prediction is None if the step does not fit.
        """
        program, advice = self.program, self.advice
        prediction = self.prediction if self.fits else None
        devices, params = program.mesh.devices, jax.tree.leaves(program.state.params)
        return {
            "device_kind": devices.flat[0].device_kind,
            "platform": devices.flat[0].platform,
            "devices": devices.size,
            "hosts": len({device.process_index for device in devices.flat}),
            "mesh": dict(program.mesh.shape),
            "pipeline": {
                **program.pipeline._asdict(),
                "iterations": program.pipeline.iterations,
                "bubble": program.pipeline.bubble,
            },
            "attention": program.execution.attention,
            "num_parameters": sum(leaf.size for leaf in params),
            "tokens_per_step": program.tokens_per_step,
            "model_flops_per_step": program.flops_per_step,
            "memory": asdict(self.budget),
            "fits": self.fits,
            **self.memory.as_json(),
            "compile": self.compilation and asdict(self.compilation),
            "execution": self.cost.as_json(),
            "prediction": prediction and prediction.as_json(),
            "advice": advice and asdict(advice),
            "weak_scaling": [asdict(row) for row in self.scaling],
        }


def estimate(program: Program, budget: MemoryBudget | None = None) -> Plan:
    """Return a plan estimated from shapes, in milliseconds and without a compiler.

    `budget` defaults to the memory of the device's chip, less the default margin.
    """
    budget, step = budget or _budget_of(program), local_step(program)
    memory, cost = estimate_memory(program, step), estimate_step(program, step)
    return Plan(program, budget, memory, cost)


def compile_and_read(program: Program, budget: MemoryBudget | None = None) -> Plan:
    """Compile the step, and return the plan that is read from the optimized program.

    The cost is estimated if the step does not fit or XLA cannot print the program.
    `budget` has the same default as in `estimate`.
    """
    guess = estimate(program, budget)
    result, compilation = measure_compile(program)
    memory, text = device_memory(program, result), None
    if not isinstance(result, OutOfMemory):
        # XLA of jax 0.10 cannot print some programs for v5p and v6e.
        with suppress(jax.errors.JaxRuntimeError):
            text = result.as_text()
    cost = guess.cost
    if text:
        flops = {section.name: section.flops for section in guess.cost.sections}
        read = read_step(program, text, flops)
        cost = replace(read, host_bytes=guess.cost.host_bytes)
    memory = replace(memory, temporaries=guess.memory.temporaries)
    return Plan(program, guess.budget, memory, cost, text=text, compilation=compilation)


def compile_small(program: Program, budget: MemoryBudget | None = None) -> Plan:
    """Compile a copy with few layers, and return the plan extrapolated to all layers.

    A program with few layers is compiled whole. `budget` has the same default as in
    `estimate`.
    """
    copy = make_copy(program)
    if copy is None:
        return compile_and_read(program, budget)
    whole, small_guess = estimate(program, budget), estimate(copy, budget)
    small = compile_and_read(copy, budget)
    temporaries = temporaries_by_depth(program) - temporaries_by_depth(copy)
    memory = extrapolate_memory(small.memory, whole.memory, temporaries)
    cost = extrapolate_cost(small.cost, small_guess.cost, whole.cost)
    return replace(whole, memory=memory, cost=cost, compilation=small.compilation)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.middle.step_s


def _budget_of(program: Program) -> MemoryBudget:
    devices = program.mesh.devices
    device = devices.flat[0]
    chip, limit = chip_of(device.device_kind), memory_limit(device)
    return memory_budget(chip, num_devices=devices.size, limit=limit)
