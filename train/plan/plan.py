"""Plan a step on its devices: memory, cost, predicted speed and advice.

`compile_and_read` compiles the step, `compile_small` a copy with few layers, and
`estimate` nothing.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from train.hardware.chips import Chip, chip_of
from train.hardware.interconnect import NotStated
from train.plan.advice import Advice, advise
from train.plan.aot import Compilation, OutOfMemory, measure_compile
from train.plan.budget import MemoryBudget, budget_of
from train.plan.compiled.step import read_step
from train.plan.cost import ESTIMATED, StepCost
from train.plan.estimated.local_step import local_step
from train.plan.estimated.step import (
    estimate_memory,
    estimate_step,
    temporaries_by_depth,
)
from train.plan.fit import make_fit
from train.plan.memory import DeviceMemory, Verdict, device_memory, judge
from train.plan.recomputing import format_policy, policies_keeping_more
from train.plan.roofline import Prediction, predict
from train.plan.scaling import ScalingPoint, weak_scaling
from train.plan.small_copy import extrapolate_memory, make_copy
from train.resolve.program import ConfiguredProgram

# Rows with an expert axis in benchmarks/published_b200.json and published_experts.json.
_UNCONFIRMED = (
    "public runs with experts across GPUs took 0.4 to 1.8 times the estimated time. "
    "Compile this step, which needs pip install -e '.[plan-gpu]'"
)


@dataclass(frozen=True)
class Plan:
    """The plan of one step, with figures for one device.

    text: the optimized HLO; None if there is no compiled program to read.
    compilation: the time and host memory of compiling; None if it was not tried.
    """

    program: ConfiguredProgram
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
    def verdict(self) -> Verdict:
        """Whether the step fits, with a reason."""
        return judge(self.memory.needed, self.budget.available)

    @property
    def prediction(self) -> Prediction | None:
        """The predicted speed; None if there is none that public runs confirm."""
        return None if self.missing_prediction else self.relative_prediction

    @cached_property
    def relative_prediction(self) -> Prediction | None:
        """The predicted speed, to compare layouts by.

        None if the chip's rates are unknown (always on CPU).
        """
        program = self.program
        chip = self._chip
        with suppress(NotStated):
            if chip:
                return predict(
                    self.cost,
                    program.config.model,
                    program.config.data,
                    mesh=program.mesh,
                    chip=chip,
                )
        return None

    @property
    def missing_prediction(self) -> str:
        """The reason why there is no prediction; "" if there is one."""
        mesh = self.program.mesh
        if self.relative_prediction is None:
            kind = mesh.devices.flat[0].device_kind
            return f"not all rates of {kind} are known"
        return "" if is_confirmed(self.cost, mesh) else _UNCONFIRMED

    @property
    def _chip(self) -> Chip | None:
        return chip_of(self.program.mesh.devices.flat[0].device_kind)

    @cached_property
    def advice(self) -> Advice | None:
        """The bottleneck and its remedy; None if a fitting step has no prediction."""
        prediction = self.prediction
        program = self.program
        if not self.fits:
            searchable = self.relative_prediction is not None
            return make_fit(program, self.memory, self.budget, searchable=searchable)
        if prediction is None:
            return None
        config = program.config
        advice = advise(
            prediction, model=config.model, data=config.data, train=config.train
        )
        if advice.override.startswith("train.remat="):
            return self._choose_policy(advice)
        return advice

    def _choose_policy(self, advice: Advice) -> Advice:
        """Return advice with the fastest policy that recomputes less, by estimates."""
        train = self.program.config.train
        step_times = dict[str, float]()
        larger_policies = policies_keeping_more(self.program.config.model, train)
        for policy in (train.remat, *larger_policies):
            changed = self.program.with_train_config(replace(train, remat=policy))
            plan = estimate(changed, self.budget)
            prediction = plan.relative_prediction
            if prediction and (plan.fits or policy == train.remat):
                step_times[format_policy(policy)] = prediction.middle.step_s
        best = min(step_times, key=step_times.__getitem__)
        if best == format_policy(train.remat):
            change = "recomputing less does not fit, or is estimated to be no faster"
            return replace(advice, change=change, override="search=true")
        return replace(advice, override=f"train.remat={best}")

    @cached_property
    def scaling(self) -> list[ScalingPoint]:
        """Predictions by number of slices; [] for one, or if the step does not fit."""
        program = self.program
        chip = self._chip
        if chip is None or self.prediction is None or not self.fits:
            return []
        return weak_scaling(
            self.cost,
            program.config.model,
            program.config.data,
            mesh=program.mesh,
            chip=chip,
        )

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values, under the keys of plan.json.

        The prediction is None if the step does not fit.
        """
        program = self.program
        advice = self.advice
        prediction = self.prediction if self.fits else None
        devices = program.mesh.devices
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
            "attention": program.execution.attention.kernel,
            "num_parameters": program.num_params,
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


def is_confirmed(cost: StepCost, mesh: Mesh) -> bool:
    """Return whether public runs confirm predictions from such a cost.

    They do not confirm estimates of experts across GPUs (docs/results.md).
    """
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    return not (on_gpu and cost.how == ESTIMATED and mesh.shape["expert"] > 1)


def estimate(program: ConfiguredProgram, budget: MemoryBudget | None = None) -> Plan:
    """Return a plan estimated from shapes, without a compiler.

    `budget` defaults to the memory of the device's chip, less the default margin.
    """
    budget = budget or budget_of(list(program.mesh.devices.flat))
    step = local_step(program)
    memory = estimate_memory(program, step)
    cost = estimate_step(program, step)
    return Plan(program, budget, memory, cost)


def compile_and_read(
    program: ConfiguredProgram, budget: MemoryBudget | None = None
) -> Plan:
    """Compile the step, and return the plan that is read from the optimized program.

    The cost is estimated if the step does not fit or XLA cannot print the program.
    `budget` has the same default as in `estimate`.
    """
    return compile_estimated(estimate(program, budget))


def compile_estimated(guess: Plan) -> Plan:
    """Compile the step of an estimated plan, and return the plan that is read."""
    program = guess.program
    result, compilation = measure_compile(program)
    memory = device_memory(program, result)
    text = None
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


def compile_small(
    program: ConfiguredProgram, budget: MemoryBudget | None = None
) -> Plan:
    """Return an estimate whose memory is extrapolated from a compiled copy.

    The copy has few layers; a program with few layers is compiled whole. `budget` has
    the same default as in `estimate`.
    """
    copy = make_copy(program)
    if copy is None:
        return compile_and_read(program, budget)
    whole = estimate(program, budget)
    small = compile_and_read(copy, budget)
    temporaries = temporaries_by_depth(program) - temporaries_by_depth(copy)
    memory = extrapolate_memory(small.memory, whole.memory, temporaries)
    return replace(whole, memory=memory, compilation=small.compilation)
