"""`python -m train.plan`: what training would do, without doing it.

With a target it compiles the very step of training, with the very same shardings, for a
machine that need not be there. Exit codes: 0 it fits, 4 it does not, 1 nothing could be
said because the target's compiler is not installed.
"""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from train.command import run_command
from train.config import ConfigError, Mistake, PlanConfig, Platform
from train.exits import DOES_NOT_FIT, FINISHED
from train.rules import validate
from train.targets import CPU, Target, parse_target

if TYPE_CHECKING:
    from train.program import Program

_NOT_COMPILED = 1


def main(config: PlanConfig) -> int:
    """Print layout and cost; with a target, what the compiled step holds."""
    from train.aot import measure_compile
    from train.describe import describe, describe_array
    from train.execution import print_execution, read_execution
    from train.ledger import make_ledger, print_ledger, room_of
    from train.topology import missing_compiler

    named = config.target not in (None, CPU)
    target = parse_target(config.target) if named and config.target else None
    program = _program(config, target)
    if not config.json:
        describe(program)
        if config.plan.array is not None:
            describe_array(program, config.plan.array)
    facts = {"target": config.target} | _facts(program, target)
    if config.target is None:
        if config.json:
            print(json.dumps(facts | make_ledger(program).as_json()))
        return FINISHED

    missing, compiled, cost = target and missing_compiler(target), None, None
    if missing:
        print(f"not compiled: {missing}", file=sys.stderr)
    else:
        compiled, cost = measure_compile(program)
    ledger = make_ledger(program, compiled)
    executed = read_execution(program, compiled)
    room = room_of(target, program.mesh.size, config.margin)
    fits = ledger.fits(room)
    if config.json:
        verdict = {"fits": fits, "memory": dataclasses.asdict(room)}
        facts |= {"compile": cost and dataclasses.asdict(cost)}
        facts |= {"execution": executed and executed.as_json()}
        print(json.dumps(facts | ledger.as_json() | verdict))
    else:
        if executed:
            print_execution(executed)
        print_ledger(ledger, room, cost)
    return {True: FINISHED, False: DOES_NOT_FIT, None: _NOT_COMPILED}[fits]


def _program(config: PlanConfig, target: Target | None) -> "Program":
    """Lay training out on the target's devices, or on those that are here."""
    from data.sources import encoding_of
    from data.tokenizer import padded_vocab_size
    from train.program import make_program, settle
    from train.runtime import set_up
    from train.topology import fake_devices, prepare

    runtime = config.runtime
    if config.target is not None:
        runtime = dataclasses.replace(runtime, platform=Platform.cpu)
    set_up(runtime)
    if target is not None:
        prepare()
    encoding = encoding_of(config.data)
    return make_program(
        settle(config, padded_vocab_size(encoding), encoding.n_vocab),
        fake_devices(target) if target else None,
    )


def _facts(program: "Program", target: Target | None) -> dict[str, Any]:
    """Say of which program on which machine a JSON object speaks."""
    import jax

    devices = program.mesh.devices
    return {
        "device_kind": devices.flat[0].device_kind,
        "platform": devices.flat[0].platform,
        "devices": devices.size,
        "chips": target.num_chips if target else None,
        "hosts": len({device.process_index for device in devices.flat}),
        "slices": target.slices if target else None,
        "mesh": dict(program.mesh.shape),
        "attention": program.how.attention,
        "num_parameters": sum(x.size for x in jax.tree.leaves(program.state.params)),
        "tokens_per_step": program.tokens_per_step,
        "model_flops_per_step": program.flops_per_step,
    }


def mistakes(config: PlanConfig) -> list[Mistake]:
    """List what is wrong, the target's name too."""
    found = validate(config)
    if config.target not in (None, CPU):
        try:
            parse_target(config.target)
        except ConfigError as error:
            found += error.mistakes
    return found


if __name__ == "__main__":
    run_command(main, "plan", PlanConfig, mistakes)
