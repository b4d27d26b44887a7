"""`python -m train.plan`: what training would do, without doing it.

With a target it compiles the very step of training, with the very same shardings, for a
machine that need not be there; where that machine's compiler is not installed it
estimates. Exit codes: 0 it fits, 4 it does not.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from train.cli.command import run_command
from train.cli.rules import validate
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
    """Print layout and cost; with a target, what a step needs and how fast it is."""
    from train.describe import describe, print_parameters
    from train.hardware.devices import missing_compiler
    from train.plan.array_layout import describe_array
    from train.plan.budget import memory_budget, memory_limit
    from train.plan.plan import compile_and_read, estimate
    from train.plan.search.result import print_result
    from train.plan.search.search import choose, search
    from train.plan.show import print_inspection

    named = config.target not in (None, CPU)
    target = parse_target(config.target) if named and config.target else None
    config, devices, num_tokens, check_vocab = _prepare(config, target)
    chip = target.chip if target else chip_of(devices[0].device_kind)
    limit = memory_limit(devices[0])
    budget = memory_budget(chip, config.margin, len(devices), limit)
    missing = target and missing_compiler(target)
    if missing:
        print(f"estimated, not compiled: {missing}", file=sys.stderr)
    compiler = not missing and (config.target is not None or config.show)
    compiles = config.search_compiles if compiler else 0
    if config.search or config.mesh.planned:
        check_vocab()  # no layout is worth looking for
    if config.search:
        limits = compiles, config.search_minutes
        result = search(config, devices, budget, *limits, config.search_precision)
        if config.json:
            print(json.dumps(dataclasses.asdict(result)))
        else:
            print_result(result, config)
        return FINISHED if result.best else DOES_NOT_FIT
    if config.mesh.planned:
        limits = config.margin, compiles, config.search_minutes
        config = choose(config, devices, *limits).applied(config)
    program = _lay_out(config, devices, num_tokens, check_vocab)
    if not config.json:
        describe(program)
        print_parameters(program)
        if config.plan.array is not None:
            describe_array(program, config.plan.array)
    plan = (compile_and_read if compiler else estimate)(program, budget)
    values, found = _as_json(config, target, plan), _inspect(config, plan)
    if config.target is not None or config.show:
        values |= _for_page(plan, found)
    if config.json:
        print(json.dumps(values))
    else:
        _print(plan, config.target is not None)
        if found:
            print_inspection(found)
    if config.target is not None or config.show:
        _write(config, values, plan)
    return DOES_NOT_FIT if config.target is not None and not plan.fits else FINISHED


def _prepare(
    config: PlanConfig, target: Target | None
) -> "tuple[PlanConfig, list[Device], int, Callable[[], Any]]":
    """Settle the config, and find the target's devices, or those that are here.

    The last two results are the number of the tokenizer's ids, and a function that
    checks that the model's vocabulary holds them.
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
    vocab = padded_vocab_size(encoding), encoding.n_vocab
    settled: Any = settle(config, vocab[0])
    devices = fake_devices(target) if target else jax.devices()
    return settled, devices, vocab[1], partial(settle, config, *vocab)


def _lay_out(
    config: PlanConfig,
    devices: "list[Device]",
    num_tokens: int,
    check_vocab: Callable[[], Any],
) -> "Program":
    """Lay the config out, or list all that does not fit devices, data and model."""
    from model.gpt import abstract_gpt, params_of
    from train.plan.array_layout import find_array
    from train.program import make_program

    array, checks = config.plan.array, [check_vocab]
    if array is not None:
        params = params_of(abstract_gpt(config.model))
        checks.append(partial(find_array, params, array))
    lay_out = partial(make_program, config, devices, num_tokens=num_tokens)
    return check_all(lay_out, *checks)[0]


def _print(plan: "Plan", verdict: bool) -> None:
    """Print the figures; whether they fit, and what to change, for a target only."""
    from train.plan.advice import print_prediction, print_remedy
    from train.plan.cost import print_cost
    from train.plan.memory import print_memory
    from train.plan.scaling import print_weak_scaling

    print_cost(plan.cost)
    print_memory(plan.memory, plan.budget if verdict else None, plan.compilation)
    if plan.unpredicted:
        print(f"no prediction: {plan.unpredicted}")
    if not (verdict and plan.advice):
        return
    if plan.fits and plan.prediction:
        print_prediction(plan.prediction, plan.advice)
        if plan.scaling:
            print_weak_scaling(plan.scaling)
    else:
        print_remedy(plan.advice)


def _as_json(config: PlanConfig, target: Target | None, plan: "Plan") -> dict[str, Any]:
    """Return what was asked, and all figures, as plain values."""
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
    """Look into the compiled step, if asked to."""
    from model.params import named
    from train.plan.compiled.inspection import inspect

    if not config.show:
        return None
    if plan.text is None:
        print("nothing to show: there is no compiled step", file=sys.stderr)
        return None
    return inspect(plan.text, [name for name, _ in named(plan.program.state)])


def _for_page(plan: "Plan", found: "Inspection | None") -> dict[str, Any]:
    """Return what the page shows beside the figures."""
    from train.plan.advice import remedy, summary
    from train.plan.compiled.trip_counts import read_module
    from train.plan.page import page_data
    from train.plan.show import inspection_data

    prediction, advice = plan.prediction, plan.advice
    texts = remedy(advice) if advice else []
    if plan.fits and prediction and advice:
        texts = summary(prediction, advice)
    module = read_module(plan.text) if plan.text else None
    shown = {"inspection": found and inspection_data(found)}
    return page_data(plan.program, module, texts, sys.argv[1:]) | shown


def _write(config: PlanConfig, values: dict[str, Any], plan: "Plan") -> None:
    """Leave plan.json and plan.html in a folder, and the step's texts if asked to."""
    from train.identity import of_training, run_name
    from train.plan.page import TEMPLATE
    from train.plan.show import write_texts
    from train.run.page import write_page
    from train.run.storage import run_folder, write_whole

    name = run_name(of_training(config))
    folder = run_folder(config.output or f"plans/{name}-{config.target or 'here'}")
    write_whole(folder / "plan.json", json.dumps(values, indent=1) + "\n")
    write_page(folder / "plan.html", TEMPLATE, values)
    print(f"picture     {folder}/plan.html", file=sys.stderr)
    if config.show and plan.text:
        files = ", ".join(write_texts(plan.program, plan.text, folder))
        print(f"texts       {folder}: {files}", file=sys.stderr)


def mistakes(config: PlanConfig) -> list[Mistake]:
    """Return what is wrong, the target's name too."""
    found = validate(config)
    if config.target not in (None, CPU):
        try:
            parse_target(config.target)
        except ConfigError as error:
            found += error.mistakes
    elif config.search:
        rule = "needs a machine to search for, say target=v5e-256"
        found.append(Mistake("search", True, rule))
    if config.search_precision and not config.search:
        found.append(Mistake("search_precision", True, "needs search=true; add it"))
    if config.search and config.show:
        rule = "shows one layout: leave out search=true, or take mesh=planned"
        found.append(Mistake("show", True, rule))
    return found


if __name__ == "__main__":
    run_command(main, "plan", PlanConfig, mistakes)
