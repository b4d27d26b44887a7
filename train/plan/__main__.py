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
from train.config import PlanConfig, Platform
from train.errors import DOES_NOT_FIT, FINISHED, ConfigError, Mistake, check_all
from train.hardware.targets import CPU, Target, parse_target

if TYPE_CHECKING:
    from train.mesh import Device
    from train.plan.memory import Room
    from train.plan.plan import Outlook
    from train.program import Program


def main(config: PlanConfig) -> int:
    """Print layout and cost; with a target, what a step needs and how fast it is."""
    from train.describe import describe, describe_array
    from train.hardware.devices import missing_compiler
    from train.plan.found import print_found
    from train.plan.memory import room_of
    from train.plan.plan import compile_and_read, estimate
    from train.plan.search import choose, search

    named = config.target not in (None, CPU)
    target = parse_target(config.target) if named and config.target else None
    config, devices, check_vocab = _prepare(config, target)
    room = room_of(target and target.chip, config.margin, len(devices))
    missing = target and missing_compiler(target)
    if missing:
        print(f"estimated, not compiled: {missing}", file=sys.stderr)
    compiler = not missing and config.target is not None
    compiles = config.search_compiles if compiler else 0
    if config.search or config.mesh.planned:
        check_vocab()  # no layout is worth looking for
    if config.search:
        found = search(config, devices, room, compiles, config.search_minutes)
        if config.json:
            print(json.dumps(dataclasses.asdict(found)))
        else:
            print_found(found)
        return FINISHED if found.best else DOES_NOT_FIT
    if config.mesh.planned:
        how = config.margin, compiles, config.search_minutes
        config = choose(config, devices, *how).applied(config)
    program = _lay_out(config, devices, check_vocab)
    if not config.json:
        describe(program)
        if config.plan.array is not None:
            describe_array(program, config.plan.array)
    outlook = (compile_and_read if compiler else estimate)(program)
    plan = _as_json(config, program, target, outlook, room)
    if config.target is not None:
        plan |= _for_page(program, outlook, room)
    if config.json:
        print(json.dumps(plan))
    else:
        _print(program, outlook, room if config.target else None)
    if config.target is None:
        return FINISHED
    _write(config, plan)
    return FINISHED if outlook.ledger.fits(room) else DOES_NOT_FIT


def _prepare(
    config: PlanConfig, target: Target | None
) -> "tuple[PlanConfig, list[Device], Callable[[], Any]]":
    """Settle the config, and find the target's devices, or those that are here.

    Last comes what checks that the model's vocabulary holds the tokenizer's.
    """
    import jax

    from data.sources import encoding_of
    from data.tokenizer import padded_vocab_size
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
    return settled, devices, partial(settle, config, *vocab)


def _lay_out(
    config: PlanConfig, devices: "list[Device]", check_vocab: Callable[[], Any]
) -> "Program":
    """Lay the config out, or list all that does not fit devices, data and model."""
    from model.gpt import abstract_gpt, params_of
    from train.describe import find_array
    from train.program import make_program

    array, checks = config.plan.array, [check_vocab]
    if array is not None:
        params = params_of(abstract_gpt(config.model))
        checks.append(partial(find_array, params, array))
    return check_all(partial(make_program, config, devices), *checks)[0]


def _print(program: "Program", outlook: "Outlook", room: "Room | None") -> None:
    from train.plan.advice import print_prediction
    from train.plan.cost import print_cost
    from train.plan.memory import print_ledger
    from train.plan.scaling import print_weak_scaling

    print_cost(outlook.execution)
    print_ledger(outlook.ledger, room, outlook.cost)
    advice = room and outlook.advise(program, room)
    if outlook.prediction and advice:
        print_prediction(outlook.prediction, advice)
    else:
        print(f"no prediction: {outlook.unpredicted}")
    if scaled := outlook.scaled(program):
        print_weak_scaling(scaled)


def _as_json(
    config: PlanConfig,
    program: "Program",
    target: Target | None,
    outlook: "Outlook",
    room: "Room",
) -> dict[str, Any]:
    """Give all figures as plain values."""
    from train.describe import array_slices

    array = config.plan.array
    devices = program.mesh.devices
    return {
        "target": config.target,
        "device_kind": devices.flat[0].device_kind,
        "platform": devices.flat[0].platform,
        "devices": devices.size,
        "chips": target.num_chips if target else None,
        "hosts": len({device.process_index for device in devices.flat}),
        "slices": target.slices if target else None,
        "mesh": dict(program.mesh.shape),
        "attention": program.how.attention,
        "num_parameters": program.num_params,
        "array": array and array_slices(program, array),
        "tokens_per_step": program.tokens_per_step,
        "model_flops_per_step": program.flops_per_step,
        "memory": dataclasses.asdict(room),
        "fits": outlook.ledger.fits(room),
        **outlook.as_json(program, room),
    }


def _for_page(program: "Program", outlook: "Outlook", room: "Room") -> dict[str, Any]:
    """Return what the page shows beside the figures."""
    from train.plan.advice import said
    from train.plan.page import page_data

    advice, prediction = outlook.advise(program, room), outlook.prediction
    summary = said(prediction, advice) if prediction and advice else []
    return page_data(program, outlook.module, summary, sys.argv[1:])


def _write(config: PlanConfig, plan: dict[str, Any]) -> None:
    """Leave plan.json and plan.html in a folder."""
    from train.identity import of_training, run_name
    from train.plan.page import TEMPLATE
    from train.run.page import write_page
    from train.run.storage import run_folder, write_whole

    name = run_name(of_training(config))
    folder = run_folder(config.output or f"plans/{name}-{config.target}")
    write_whole(folder / "plan.json", json.dumps(plan, indent=1) + "\n")
    write_page(folder / "plan.html", TEMPLATE, plan)
    print(f"picture     {folder}/plan.html", file=sys.stderr)


def mistakes(config: PlanConfig) -> list[Mistake]:
    """List what is wrong, the target's name too."""
    found = validate(config)
    if config.target not in (None, CPU):
        try:
            parse_target(config.target)
        except ConfigError as error:
            found += error.mistakes
    elif config.search:
        rule = "needs a machine to search for, say target=v5e-256"
        found.append(Mistake("search", True, rule))
    return found


if __name__ == "__main__":
    run_command(main, "plan", PlanConfig, mistakes)
