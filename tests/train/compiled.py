"""Compile the real training step for the CPU, or for chips of another machine.

XLA takes half a minute to compile a step for a TPU, so the texts of the steps in STEPS
are stored next to the tests that read them. A slow test compiles them again and
compares.

    python -m tests.train.compiled [name ...]

This command renews the named texts, or all if none is named. Run it when the scopes of
the model or the compiler change. It needs the compiler of the target:
pip install -e '.[plan]'.
"""

import functools
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

from tests.fleet import REPOSITORY
from train.hardware import devices
from train.hardware.targets import parse_target
from train.plan.compiled import step
from train.plan.compiled.collectives import Collective, list_collectives
from train.plan.compiled.hlo import Module
from train.plan.compiled.trip_counts import read_module
from train.plan.cost import StepCost
from train.plan.estimated.local_step import local_step
from train.resolve.program import ConfiguredProgram, make_program

L = 3
D = 256
F = 512
V = 512
T = 256
B = 16
N = 4
SHAPE = (
    *("model=llama3_1b", "model.tied_head=false", "optimizer=adamw", "tracker=none"),
    *(f"model.num_layers={L}", f"model.embed_dim={D}", f"model.mlp_dim={F}"),
    *(f"model.num_heads={N}", f"model.num_kv_heads={N}", f"model.vocab_size={V}"),
    *(f"data.sequence_length={T}", f"data.batch_size={B}"),
)
DOWN = D * F
MATRICES = 4 * D * D + 3 * D * F  # matrix parameters of a layer
NORMS = (2 * L + 1) * D

TILES = f"train.loss_chunk_tokens={T // 4}"
TENSOR = ("mesh=fsdp_tensor", "mesh.tensor=2")
LARGE = (
    *("model.embed_dim=512", "model.mlp_dim=1024", "model.num_heads=8"),
    *("model.num_kv_heads=8", "data.sequence_length=1024"),
)
GPT2 = ("model=gpt2_124m", "model.tied_head=true", f"model.mlp_dim={F}")
LOCAL = (
    *("data.sequence_length=2048", "model.layer_pattern=[local,local,global]"),
    *("model.window=300", "model.attention_soft_cap=50", "model.attention_sinks=true"),
)
# The target of each step, and its overrides in addition to SHAPE.
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("v5e-8", ("mesh=ddp",)),
    "ddp_tied": ("v5e-8", ("mesh=ddp", "model.tied_head=true")),
    "ddp_dots": ("v5e-4", ("mesh=ddp", "train.remat=dots")),
    "ddp_full": ("v5e-4", ("mesh=ddp", "train.remat=full")),
    "ddp_attention": ("v5e-4", ("mesh=ddp", "train.remat=[attention]")),
    "shared_heads": ("v5e-4", ("mesh=ddp", "model.num_kv_heads=2")),
    "gpt2_full": ("v5e-4", (*GPT2, "mesh=ddp", "train.remat=full")),
    "local": ("v5e-4", (*LOCAL, "mesh=ddp", "train.remat=[attention]")),
    "fsdp": ("v5e-8", ("mesh=fsdp",)),
    "fsdp_tiles": ("v5e-8", ("mesh=fsdp", TILES)),
    "tensor": ("v5e-8", TENSOR),
    "tensor_tiles": ("v5e-8", (*TENSOR, TILES)),
    "tensor_only": ("v5e-4", ("mesh=fsdp_tensor", "mesh.tensor=4")),
    "sparse_cores": ("v6e-8", ("mesh=fsdp", *LARGE)),
    "slices": ("v5e-4x2", ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2")),
}
# The installed compiler does not make these texts; libtpu 0.0.51 with jax 0.12 does.
KEPT = {"sparse_core_calls": ("tpu7x-16", ("mesh=fsdp", *LARGE))}
STORE = Path(__file__).with_name("plan") / "compiled" / "hlo"
MEMORY = STORE / "memory.json"
AHEAD = REPOSITORY / "tests" / "kernels" / "ahead.py"


def in_one(instruction: str) -> str:
    """Return the text of a program with one instruction."""
    lines = ["HloModule one", "", "ENTRY %main (a: f32[1]) -> f32[1] {", instruction]
    return "\n".join([*lines, "}"])


class Compiled(NamedTuple):
    """A compiled step. `memory` is bytes per device, by kind; a CPU has None."""

    text: str
    program: ConfiguredProgram
    module: Module
    collectives: list[Collective]
    memory: dict[str, int] | None = None

    @property
    def cost(self) -> StepCost:
        """The cost that a plan reads; the FLOPs of kernels come from the estimate."""
        flops = local_step(self.program).flops
        return step.read_step(self.program, self.text, flops)


Compile = Callable[..., Compiled]


def make_compile(composed: Callable) -> Compile:
    """Return compile_step(overrides), which compiles for this CPU's devices."""

    @functools.cache
    def compile_once(overrides: tuple[str, ...]) -> Compiled:
        program = make_program(composed([*SHAPE, *overrides]), jax.devices())
        traced = program.train_step.trace(program.state, program.batch)
        text = traced.lower().compile().as_text() or ""
        return read_step(program, text)

    def compile_step(overrides: Sequence[str]) -> Compiled:
        return compile_once(tuple(overrides))

    return compile_step


def make_stored(composed: Callable) -> Compile:
    """Return stored_step(name), which reads a text of STEPS without a compiler."""

    @functools.cache
    def stored_step(name: str) -> Compiled:
        target, overrides = (STEPS | KEPT)[name]
        config = composed([*SHAPE, *overrides])
        with mock.patch.object(devices.importlib.util, "find_spec", return_value=None):
            chips = devices.fake_devices(parse_target(target))
        text = gzip.decompress((STORE / f"{name}.txt.gz").read_bytes()).decode()
        memory = json.loads(MEMORY.read_text()).get(name)
        return read_step(make_program(config, chips), text, memory)

    return stored_step


def read_step(
    program: ConfiguredProgram, text: str, memory: dict[str, int] | None = None
) -> Compiled:
    module = read_module(text, program.config.model)
    assert module.unread == []
    return Compiled(
        text, program, module, list_collectives(module, program.mesh), memory
    )


def compile_ahead(cases: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile cases (tests/kernels/ahead.py) in a separate process.

    Returns:
        The result of each case, by name. The texts are in the folder.
    """
    completed = subprocess.run(
        [sys.executable, str(AHEAD), str(folder), json.dumps(cases)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    return {result.pop("name"): result for result in results}


def compile_steps(names: list[str], folder: Path) -> dict[str, dict[str, int]]:
    """Compile steps into a folder, in their stored form, and return their memory."""
    cases = {
        name: {"target": target, "step": [*SHAPE, *overrides]}
        for name, (target, overrides) in (STEPS | KEPT).items()
        if name in names
    }
    results = compile_ahead(cases, folder)
    for name in names:
        assert "error" not in results[name], results[name]
        text = (folder / f"{name}.txt").read_text()
        (folder / f"{name}.txt.gz").write_bytes(
            gzip.compress(without_ballast(text).encode(), mtime=0)
        )
    return {name: results[name]["memory"] for name in names}


def without_ballast(text: str) -> str:
    """Remove the parts that no test reads: kernels, source lines, estimates."""
    text = re.sub(r'"body":"[^"]*"', '"body":""', text)
    text = re.sub(r", backend_config=\{(?!.*collective).*", "", text)
    text = re.sub(r" stack_frame_id=\d+", "", text)
    tables = r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*"
    return re.sub(tables, "", text)


def main(names: list[str]) -> None:
    """Renew the stored texts."""
    names = names or [*STEPS]
    STORE.mkdir(exist_ok=True)
    memory = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        memory |= compile_steps(names, Path(folder))
        for name in names:
            file = f"{name}.txt.gz"
            (STORE / file).write_bytes((Path(folder) / file).read_bytes())
    memory_of_steps = {name: memory[name] for name in STEPS if name in memory}
    MEMORY.write_text(json.dumps(memory_of_steps, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
