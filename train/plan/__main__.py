"""`python -m train.plan`: the layout, memory and speed of training, without training.

If a target is set, the program prints an estimate, and then compiles the training step,
with the shardings of training, for a machine that may not be present. If that machine's
compiler is not installed, or with `compile=false`, the plan is the estimate. A finished
plan exits with 4 if the step does not fit the target, or if a search finds no layout
that fits, and with 0 otherwise.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from data.errors import Mistake
from train.cli.command import Command, run_command
from train.cli.rules import config_mistakes
from train.config import Platform
from train.errors import DOES_NOT_FIT, FINISHED, ConfigError, check_all, writing
from train.hardware.targets import CPU, Target, parse_target
from train.plan.config import PlanConfig

if TYPE_CHECKING:
    from train.plan.budget import MemoryBudget
    from train.plan.memory import Verdict
    from train.plan.plan import Plan
    from train.resolve.mesh import Device
    from train.resolve.program import ConfiguredProgram


def main(config: PlanConfig) -> int:
    """Print the layout and cost of a step, and return the exit code."""
    import jax

    from data.encoding import padded_vocab_size
    from data.sources import encoding_of
    from train.hardware.devices import fake_devices, missing_compiler, prepare
    from train.plan.budget import budget_of
    from train.plan.search.search import Search
    from train.resolve.program import make_program, settle
    from train.runtime import set_up

    target = problem = None
    runtime = config.runtime
    has_target = config.target is not None
    set_up(replace(runtime, platform=Platform.cpu) if has_target else runtime)
    if config.target not in (None, CPU):
        target = parse_target(config.target)
        prepare()
        problem = missing_compiler(target)
    if problem:
        print(f"estimated, not compiled: {problem}", file=sys.stderr)
    has_compiler = not problem and (has_target or config.show)
    can_compile = has_compiler and config.compile
    compiles = config.search_compiles if can_compile else 0
    devices = fake_devices(target) if target else jax.devices()
    budget = budget_of(devices, config.margin)
    encoding = encoding_of(config.data)
    vocab_size = padded_vocab_size(encoding)
    num_tokens = encoding.n_vocab
    check_vocab = partial(settle, config, vocab_size, num_tokens)
    settled: Any = settle(config, vocab_size)
    config = settled
    if config.search or config.mesh.planned:
        check_vocab()  # A mistake is reported before a long search, not after it.
    if config.search:
        return _search(config, devices, budget, compiles)
    if config.mesh.planned:
        search = Search(config, devices, budget)
        layout = search.choose(compiles, config.search_minutes)
        config = layout.applied(config)
    make = partial(make_program, config, devices, num_tokens=num_tokens)
    program, _ = check_all(make, check_vocab)
    return _plan(config, target, program, budget, can_compile)


def _search(
    config: PlanConfig,
    devices: "Sequence[Device]",
    budget: "MemoryBudget",
    compiles: int,
) -> int:
    """Search for a layout, print the result, and return the exit code."""
    from train.plan.search.result import print_result
    from train.plan.search.search import Search

    search = Search(config, devices, budget, precision=config.search_precision)
    result = search.run(compiles, config.search_minutes)
    if config.json:
        print(json.dumps(asdict(result)))
    else:
        print_result(result, config.mesh)
    return FINISHED if result.best else DOES_NOT_FIT


def _plan(
    config: PlanConfig,
    target: Target | None,
    program: "ConfiguredProgram",
    budget: "MemoryBudget",
    can_compile: bool,
) -> int:
    """Plan a program, print and write the plan, and return the exit code."""
    from data.phases import phases_of
    from model.params import named
    from train.describe import describe_program, print_parameters
    from train.plan.array_layout import array_slices, print_slices
    from train.plan.compiled.inspection import inspect
    from train.plan.compiling import print_changes, print_estimate, shown_compilation
    from train.plan.page import page_data
    from train.plan.phases import plan_phases, print_phases, verdict_with_phases
    from train.plan.plan import compile_and_read, compile_estimated, estimate
    from train.plan.show import print_inspection, sentences

    array = config.plan.array and array_slices(program, config.plan.array)
    if not config.json:
        describe_program(program)
        print_parameters(program)
        if array:
            print_slices(array)
    make_plan = partial(compile_and_read if can_compile else estimate, budget=budget)
    guess = plan = estimate(program, budget)
    if can_compile:
        if not config.json:
            print_estimate(guess)
        with shown_compilation(config.target or "this machine"):
            plan = compile_estimated(guess)
    phases = plan_phases(plan, make_plan) if len(phases_of(config.data)) > 1 else []
    inspection = None
    if config.show and plan.text:
        names = [name for name, _ in named(program.state)]
        inspection = inspect(plan.text, names, config.model)
    values = {
        "target": config.target,
        "chips": target and target.num_chips,
        "slices": target and target.slices,
        "array": array,
        "phases": phases,
        **plan.as_json(),
    }
    has_target = config.target is not None
    verdict = verdict_with_phases(plan.verdict, phases) if has_target else None
    values["verdict"] = verdict and verdict._asdict()
    has_page = has_target or config.show
    if has_page:
        values |= page_data(plan, sys.argv[1:])
        values["inspection"] = inspection and {
            **asdict(inspection),
            "sentences": sentences(inspection),
        }
    if config.json:
        print(json.dumps(values))
    else:
        print_plan(plan, verdict)
        if can_compile:
            print_changes(guess, plan)
        if phases:
            print_phases(phases)
        if inspection:
            print_inspection(inspection)
    if has_page:
        _write(config, values, plan)
    return DOES_NOT_FIT if verdict and verdict.answer == "no" else FINISHED


def print_plan(plan: "Plan", verdict: "Verdict | None") -> None:
    """Print the figures. If there is a verdict, also print it, and advice."""
    from train.plan.advice import print_prediction, print_remedy
    from train.plan.cost import print_cost
    from train.plan.memory import print_memory
    from train.plan.scaling import print_weak_scaling

    print_cost(plan.cost)
    print_memory(plan.memory, plan.budget if verdict else None, plan.compilation)
    if verdict:
        print(f"fits        {verdict.answer}, {verdict.reason}")
    if plan.missing_prediction:
        print(f"no prediction: {plan.missing_prediction}")
    if not (verdict and plan.advice):
        return
    if plan.fits and plan.prediction:
        print_prediction(plan.prediction, plan.advice)
        if plan.scaling:
            print_weak_scaling(plan.scaling)
    else:
        print_remedy(plan.advice)


def _write(config: PlanConfig, values: dict[str, Any], plan: "Plan") -> None:
    """Write plan.json and plan.html, and the texts of the step if `show=true`."""
    from data.storage import write_atomically
    from train.identity import run_name
    from train.masking import mask_texts
    from train.page import write_page
    from train.plan.page import TEMPLATE
    from train.plan.show import write_texts
    from train.run.folder import run_folder

    name = run_name(config.plain())
    folder = run_folder(config.output or f"plans/{name}-{config.target or 'here'}")
    with writing("output", folder):
        write_atomically(
            folder / "plan.json", json.dumps(mask_texts(values), indent=1) + "\n"
        )
        write_page(folder / "plan.html", TEMPLATE, values)
        files = list[str]()
        if config.show and plan.text:
            files = write_texts(plan.program, plan.text, folder)
    print(f"page        {folder}/plan.html", file=sys.stderr)
    if files:
        print(f"texts       {folder}: {', '.join(files)}", file=sys.stderr)


def plan_mistakes(config: PlanConfig) -> list[Mistake]:
    """Return the mistakes of a config, including those of planning."""
    mistakes = config_mistakes(config)
    if config.target not in (None, CPU):
        try:
            parse_target(config.target)
        except ConfigError as error:
            mistakes += error.mistakes
    elif config.search:
        rule = "needs a machine to search for, for example target=v5e-256"
        mistakes.append(Mistake("search", True, rule))
    if config.search_precision and not config.search:
        rule = "needs search=true; add it"
        mistakes.append(Mistake("search_precision", True, rule))
    if config.show and not config.compile:
        rule = "shows the compiled step; remove compile=false"
        mistakes.append(Mistake("show", True, rule))
    if config.search and config.show:
        rule = "shows one layout: remove search=true, or use mesh=planned"
        mistakes.append(Mistake("show", True, rule))
    return mistakes


COMMAND = Command(main, "plan", PlanConfig, plan_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
