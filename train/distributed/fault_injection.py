"""Inject faults into a run, to test how it handles them.

The environment variable LONGHAUL_DRILL has an effect only if the config has
`runtime.allow_fault_injection=true`. Its value is one of

- `stuck:<process>:<step>`: the process hangs after the step;
- `flip:<step>:<device>:<array>`: after the step, one bit flips in a device's shard of
  an array, say `params.embedding.weight`; <device> is an index into the flat mesh;
- `fill:<step>:<array>:<layer>:<value>`: after the step, the index <layer> of an array's
  first dim is filled with `nan` or a number. The layers of a model are stacked along
  this dim, as in `params.layers.0.0.mlp.up.weight`;
- `crash:<process>:<step>`: the process raises an exception after the step;
- `pace:<seconds>:<file>`: each step takes `<seconds>` longer until the file exists.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

import jax

from train.core.program import Program
from train.core.state import TrainState
from train.distributed.replicas import flip_bit

log = logging.getLogger(__name__)


class FaultInjection:
    """Injects the fault that LONGHAUL_DRILL describes, if the config allows it."""

    def __init__(self, process: int, allowed: bool):
        """Read the variable, and warn if it is set."""
        fault = os.environ.get("LONGHAUL_DRILL", "")
        setting = f"LONGHAUL_DRILL={fault}"
        if fault and allowed:
            log.warning("FAULT INJECTION: this run is a drill of %s", setting)
        elif fault:
            key = "runtime.allow_fault_injection=true"
            log.warning("%s has no effect without %s", setting, key)
        self._process = str(process)
        words = fault.split(":") if allowed else [""]
        self._kind = words[0]
        self._arguments = words[1:]

    def after(self, step: int, state: TrainState, program: Program) -> TrainState:
        """Return the state after a step, with the fault if it is due."""
        process_and_step = [self._process, str(step)]
        match self._kind, self._arguments:
            case "stuck", arguments if arguments == process_and_step:
                time.sleep(10**6)
            case "crash", arguments if arguments == process_and_step:
                raise RuntimeError(f"as LONGHAUL_DRILL asks for, after step {step}")
            case "pace", [seconds, file] if not Path(file).exists():
                time.sleep(float(seconds))
            case "flip", [due_step, device, array] if due_step == str(step):
                target: Any = program.mesh.devices.flat[int(device)]
                return flip_bit(state, array, target.id)
            case "fill", [due_step, array, layer, value] if due_step == str(step):
                return _fill(state, array, int(layer), float(value))
        return state


def _fill(state: TrainState, array: str, layer: int, value: float) -> TrainState:
    def fill_leaf(path: Any, leaf: jax.Array) -> jax.Array:
        if jax.tree_util.keystr(path, simple=True, separator=".") != array:
            return leaf
        fill = jax.jit(lambda x: x.at[layer].set(value), out_shardings=leaf.sharding)
        return fill(leaf)

    return jax.tree_util.tree_map_with_path(fill_leaf, state)
