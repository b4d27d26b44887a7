"""`python -m train.plan`: the layout, memory and speed of training, without training.

If a target is set, the program compiles the training step, with the shardings of
training, for a machine that may not be present. If that machine's compiler is not
installed, the step is estimated instead. A finished plan exits with 4 if the step does
not fit the target, or if a search finds no layout that fits, and with 0 otherwise.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from train.cli.command import run_command
from train.cli.rules import config_mistakes
from train.config import Platform
from train.errors import DOES_NOT_FIT, FINISHED, ConfigError, Mistake, check_all
from train.hardware.chips import chip_of
from train.hardware.targets import CPU, Target, parse_target
from train.plan.config import PlanConfig

if TYPE_CHECKING:
    from train.mesh import Device
    from train.plan.compiled.inspection import Inspection
    from train.plan.plan import Plan
    from train.program import Program


def main(config: PlanConfig) -> int:
    """Print the layout and cost of a step, and return the exit code."""
    from train.describe import describe_program, print_parameters
    from train.hardware.devices import missing_compiler
    from train.plan.array_layout import describe_array
    from train.plan.budget import memory_budget, memory_limit
    from train.plan.plan import compile_and_read, estimate
    from train.plan.search.result import print_result
    from train.plan.search.search import choose, search
    from train.plan.show import print_inspection

    is_remote = config.target and config.target != CPU
    target = parse_target(config.target) if config.target and is_remote else None
    config, devices, num_tokens, check_vocab = _prepare(config, target)
    chip = target.chip if target else chip_of(devices[0].device_kind)
    limit = memory_limit(devices[0])
    budget = memory_budget(chip, config.margin, len(devices), limit)
    problem = target and missing_compiler(target)
    if problem:
        print(f"estimated, not compiled: {problem}", file=sys.stderr)
    can_compile = not problem and (config.target is not None or config.show)
    num_compiles = config.search_compiles if can_compile else 0
    if config.search or config.mesh.planned:
        check_vocab()  # A mistake is reported before a long search, not after it.
    if config.search:
        result = search(
            config,
            devices,
            budget,
            compiles=num_compiles,
            minutes=config.search_minutes,
            precision=config.search_precision,
        )
        if config.json:
            print(json.dumps(dataclasses.asdict(result)))
        else:
            print_result(result, config)
        return FINISHED if result.best else DOES_NOT_FIT
    if config.mesh.planned:
        layout = choose(
            config,
            devices,
            margin=config.margin,
            compiles=num_compiles,
            minutes=config.search_minutes,
        )
        config = layout.applied(config)
    program = _lay_out(config, devices, num_tokens, check_vocab)
    if not config.json:
        describe_program(program)
        print_parameters(program)
        if config.plan.array is not None:
            describe_array(program, config.plan.array)
    plan = (compile_and_read if can_compile else estimate)(program, budget)
    inspection, values = _inspect(config, plan), _plan_data(config, target, plan)
    if config.target is not None or config.show:
        values |= _page_data(plan, inspection)
    if config.json:
        print(json.dumps(values))
    else:
        _print(plan, config.target is not None)
        if inspection:
            print_inspection(inspection)
    if config.target is not None or config.show:
        _write(config, values, plan)
    return DOES_NOT_FIT if config.target is not None and not plan.fits else FINISHED


def _prepare(
    config: PlanConfig, target: Target | None
) -> "tuple[PlanConfig, list[Device], int, Callable[[], Any]]":
    """Set up JAX and return the completed config and its devices.

    The last two results are the number of token ids, and a function that checks that
    the model's vocabulary contains all token ids.
    """
    import jax

    from data.encoding import padded_vocab_size
    from data.sources import encoding_of
    from train.hardware.devices import fake_devices, prepare
    from train.program import settle
    from train.runtime import set_up

    runtime = config.runtime
    if config.target is not None:
        runtime = dataclasses.replace(runtime, platform=Platform.cpu)
    set_up(runtime)
    if target is not None:
        prepare()
    encoding = encoding_of(config.data)
    vocab_size, num_tokens = padded_vocab_size(encoding), encoding.n_vocab
    settled: Any = settle(config, vocab_size)
    devices = fake_devices(target) if target else jax.devices()
    check_vocab = partial(settle, config, vocab_size, num_tokens)
    return settled, devices, num_tokens, check_vocab


def _lay_out(
    config: PlanConfig,
    devices: "list[Device]",
    num_tokens: int,
    check_vocab: Callable[[], Any],
) -> "Program":
    """Return the program, or raise a ConfigError with all mistakes at once."""
    from model.gpt import abstract_gpt, params_of
    from train.plan.array_layout import find_array
    from train.program import make_program

    array, checks = config.plan.array, [check_vocab]
    if array is not None:
        params = params_of(abstract_gpt(config.model))
        checks.append(partial(find_array, params, array))
    make = partial(make_program, config, devices, num_tokens=num_tokens)
    program, *_ = check_all(make, *checks)
    return program


def _print(plan: "Plan", verdict: bool) -> None:
    """Print the figures. If `verdict`, also print whether the step fits, and advice."""
    from train.plan.advice import print_prediction, print_remedy
    from train.plan.cost import print_cost
    from train.plan.memory import print_memory
    from train.plan.scaling import print_weak_scaling

    print_cost(plan.cost)
    print_memory(plan.memory, plan.budget if verdict else None, plan.compilation)
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


def _plan_data(
    config: PlanConfig, target: Target | None, plan: "Plan"
) -> dict[str, Any]:
    """Return the content of plan.json as plain values."""
    from train.plan.array_layout import array_slices

    array = config.plan.array
    return {
        "target": config.target,
        "chips": target.num_chips if target else None,
        "slices": target.slices if target else None,
        "array": array and array_slices(plan.program, array),
        **plan.as_json(),
    }


def _inspect(config: PlanConfig, plan: "Plan") -> "Inspection | None":
    """Return the inspection of the compiled step if `show=true`, otherwise None."""
    from model.params import named
    from train.plan.compiled.inspection import inspect

    if not config.show:
        return None
    if plan.text is None:
        print(
            "show=true has no effect: the step was estimated, not compiled",
            file=sys.stderr,
        )
        return None
    names = [name for name, _ in named(plan.program.state)]
    return inspect(plan.text, names, config.model)


def _page_data(plan: "Plan", inspection: "Inspection | None") -> dict[str, Any]:
    """Return the data of the page, except the figures of plan.json."""
    from train.plan.advice import remedy_sentences, summary_sentences
    from train.plan.compiled.trip_counts import read_module
    from train.plan.page import page_data
    from train.plan.show import inspection_data

    prediction, advice = plan.prediction, plan.advice
    texts = remedy_sentences(advice) if advice else []
    if plan.fits and prediction and advice:
        texts = summary_sentences(prediction, advice)
    module = read_module(plan.text, plan.program.config.model) if plan.text else None
    data = page_data(plan.program, module, texts, sys.argv[1:])
    return data | {"inspection": inspection and inspection_data(inspection)}


def _write(config: PlanConfig, values: dict[str, Any], plan: "Plan") -> None:
    """Write plan.json and plan.html, and the texts of the step if `show=true`."""
    from data.storage import write_atomically
    from train.identity import run_name, training_config
    from train.plan.page import TEMPLATE
    from train.plan.show import write_texts
    from train.run.folder import run_folder
    from train.run.page import write_page

    name = run_name(training_config(config))
    folder = run_folder(config.output or f"plans/{name}-{config.target or 'here'}")
    write_atomically(folder / "plan.json", json.dumps(values, indent=1) + "\n")
    write_page(folder / "plan.html", TEMPLATE, values)
    print(f"page        {folder}/plan.html", file=sys.stderr)
    if config.show and plan.text:
        files = ", ".join(write_texts(plan.program, plan.text, folder))
        print(f"texts       {folder}: {files}", file=sys.stderr)


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
    if config.search and config.show:
        rule = "shows one layout: remove search=true, or use mesh=planned"
        mistakes.append(Mistake("show", True, rule))
    return mistakes


if __name__ == "__main__":
    run_command(main, "plan", PlanConfig, plan_mistakes)
