"""The real training step, compiled for chips that are not there."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental import topologies

from train.plan.compiled.collectives import Collective, ledger
from train.plan.compiled.hlo import Module
from train.plan.compiled.trip_counts import read
from train.program import Program, make_program


def needs_tpu_compiler(test: Any) -> Any:
    """Mark a test, or a class of them."""
    there = importlib.util.find_spec("libtpu") is not None
    skip = pytest.mark.skipif(not there, reason="needs libtpu: pip install libtpu")
    return pytest.mark.tpu(skip(test))


L, D, F, V, T, B, N = 3, 256, 512, 512, 256, 16, 4
SHAPE = (
    *("model=llama3_1b", "model.tied_head=false", "optimizer=adamw", "tracker=none"),
    *(f"model.num_layers={L}", f"model.embed_dim={D}", f"model.mlp_dim={F}"),
    *(f"model.num_heads={N}", f"model.num_kv_heads={N}", f"model.vocab_size={V}"),
    *(f"data.sequence_length={T}", f"data.batch_size={B}"),
)
DOWN = D * F
MATRICES = 4 * D * D + 3 * D * F  # of a layer
NORMS = (2 * L + 1) * D


def in_one(instruction: str) -> str:
    """Make a program of one instruction."""
    lines = ["HloModule one", "", "ENTRY %main (a: f32[1]) -> f32[1] {", instruction]
    return "\n".join([*lines, "}"])


class Compiled(NamedTuple):
    program: Program
    module: Module
    collectives: list[Collective]


Compile = Callable[..., Compiled]


def make_compile(composed: Callable) -> Compile:
    """compile_step(*overrides, topology=None, **topology's arguments), CPU if None."""

    @functools.cache
    def compile_step(
        *overrides: str, topology: str | None = None, **options: Any
    ) -> Compiled:
        chips = jax.devices() if topology is None else tpus(topology, **options)
        program = make_program(composed(*SHAPE, *overrides), chips)
        fast = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", False)
        try:
            with jax.set_mesh(program.mesh):
                traced = program.train_step.trace(program.state, program.batch)
                platform = chips[0].platform
                text = traced.lower(lowering_platforms=(platform,)).compile().as_text()
        finally:
            jax.config.update("jax_disable_most_optimizations", fast)
        module = read(text)
        assert module.unread == []
        return Compiled(program, module, ledger(module, program.mesh))

    return compile_step


def tpus(topology: str, **options: Any) -> list[Any]:
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # asks no server what machine this is
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # it drives none
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=topology,
        chip_config_name="default",
        chips_per_host_bounds=(2, 2, 1),
        **options,
    )
    return list(described.devices)
