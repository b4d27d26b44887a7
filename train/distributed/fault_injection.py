"""Faults from inside a run, for drills of its guards.

Only with `runtime.allow_fault_injection=true` does the environment variable
LONGHAUL_DRILL count. It holds one of

- `stuck:<process>:<step>`: the process does nothing any more after that step;
- `flip:<step>:<device>:<array>`: one bit of what a device (by its place in the mesh)
  holds of an array of the state, say `params.embedding.weight`, is another one then;
- `fill:<step>:<array>:<layer>:<value>`: of an array of the state, say
  `params.layers.mlp.up.weight`, all of one layer is `nan` or a number then;
- `crash:<process>:<step>`: an exception;
- `pace:<seconds>:<file>`: each step takes that long more, until the file is there.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

import jax

from train.distributed.replicas import flip
from train.program import Program
from train.state import TrainState

log = logging.getLogger(__name__)


class FaultInjection:
    """Injects the fault that the environment asks for, if the config allows it."""

    def __init__(self, process: int, allowed: bool):
        """Read the variable, and say what it does."""
        fault = os.environ.get("LONGHAUL_DRILL", "")
        drill = f"LONGHAUL_DRILL={fault}"
        if fault and allowed:
            log.warning("FAULT INJECTION: this run is a drill of %s", drill)
        elif fault:
            key = "runtime.allow_fault_injection=true"
            log.warning("%s has no effect without %s", drill, key)
        self._process = str(process)
        self._kind, *self._rest = fault.split(":") if allowed else ("",)

    def after(self, step: int, state: TrainState, program: Program) -> TrainState:
        """Inject it, if its step has come."""
        match self._kind, self._rest:
            case "stuck", [process, at] if (process, at) == (self._process, f"{step}"):
                time.sleep(10**6)
            case "crash", [process, at] if (process, at) == (self._process, f"{step}"):
                raise RuntimeError(f"as LONGHAUL_DRILL asks for, after step {step}")
            case "pace", [seconds, file] if not Path(file).exists():
                time.sleep(float(seconds))
            case "flip", [at, device, array] if at == str(step):
                of_mesh: Any = program.mesh.devices.flat[int(device)]
                return flip(state, array, of_mesh.id)
            case "fill", [at, array, layer, value] if at == str(step):
                return _fill(state, array, int(layer), float(value))
        return state


def _fill(state: TrainState, array: str, layer: int, value: float) -> TrainState:
    def filled(path: Any, leaf: jax.Array) -> jax.Array:
        if jax.tree_util.keystr(path, simple=True, separator=".") != array:
            return leaf
        fill = jax.jit(lambda x: x.at[layer].set(value), out_shardings=leaf.sharding)
        return fill(leaf)

    return jax.tree_util.tree_map_with_path(filled, state)
