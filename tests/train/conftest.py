"""Tiny configs, texts and programs, shared so that each step is compiled once."""

import functools
import inspect
import json.decoder
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from data.batches import Order
from data.sources import Sources, open_sources
from model.gpt import GPT, params_of
from tests.forks import Forks
from tests.train.compiled import Compile, make_compile, make_stored
from train.config import Config
from train.feed import place
from train.hardware.devices import prepare
from train.program import Program, make_program
from train.step import make_gradients

TINY = (
    *("model.num_layers=2", "model.num_heads=4", "model.embed_dim=32"),
    *("model.init=scaled", "model.compute_dtype=float32", "model.layer_unroll=1"),
    *("data=text", "data.path=text", "data.sequence_length=32", "data.batch_size=8"),
    *("optimizer=adamw", "schedule.warmup_steps=2", "train.num_steps=20"),
    *("mesh=single", "tracker=none"),
)

Configure = Callable[..., Config]
Programs = Callable[..., Program]


@pytest.fixture
def planning() -> Iterator[None]:
    """Let this process compile for other machines, and forget it afterwards."""
    environment, cache = dict(os.environ), jax.config.jax_enable_compilation_cache
    prepare()
    yield
    os.environ.clear()
    os.environ.update(environment)
    jax.config.update("jax_enable_compilation_cache", cache)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """What starts commands; they compile as tests do, on as many devices as asked."""
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    forks = Forks(environment)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def configure(composed: Configure) -> Configure:
    """Compose a tiny config from the presets and overrides."""

    @functools.cache
    def configure(*overrides: str) -> Config:
        return composed(*TINY, *overrides)

    return configure


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of many short documents, so that most batches hold ends of some."""
    folder = tmp_path_factory.mktemp("text")
    source = inspect.getsource(json.decoder) + inspect.getsource(textwrap)
    lines = source.splitlines(keepends=True)
    for start in range(0, len(lines), 3):
        (folder / f"{start:04}.txt").write_text("".join(lines[start : start + 3]))
    return folder


@pytest.fixture(scope="session")
def store(
    configure: Configure, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Sources:
    """Its tokens."""
    cache = tmp_path_factory.mktemp("store")
    return open_sources(configure(f"data.path={text}", f"data.cache_dir={cache}").data)


@pytest.fixture(scope="session")
def programs(configure: Configure, store: Sources) -> Programs:
    """Give the program of a tiny config; its devices are as many as its mesh has."""

    @functools.cache
    def program(*overrides: str, devices: int = 1) -> Program:
        return make_program(configure(*overrides), jax.devices()[:devices])

    return program


@pytest.fixture(scope="module")
def gradients(programs: Programs, store: Sources) -> Callable:
    """Run a step's gradients: overrides -> (loss, gradients, loads of experts).

    Of the first batch, or one that is given; with a bias of experts, if it is.
    """
    steps = {}

    def gradients(*overrides, devices=8, batch=None, balance=None):
        program = programs(*overrides, devices=devices)
        if overrides not in steps:
            step = make_gradients(
                program.model, program.execution, program.config.train
            )
            steps[overrides] = jax.jit(step)
        if batch is None:
            batch = Order(store, program.config.data, 0).read(0)
            assert (batch.targets < 0).any()  # documents end inside of rows
        with jax.set_mesh(program.mesh):
            params = params_of(GPT(program.config.model, nnx.Rngs(1)))
            if balance is not None:
                router = params["layers"]["mlp"]["router"]
                router["balance"] = router["balance"] + jnp.asarray(balance)
            params = jax.device_put(params, program.shardings.params)
            batch = place(batch, program.batch)
            return jax.device_get(steps[overrides](params, batch)[:3])

    return gradients


@pytest.fixture(scope="session")
def compile_step(composed: Configure) -> Compile:
    """Compile the step of a small model for this CPU, and read its text."""
    return make_compile(composed)


@pytest.fixture(scope="session")
def stored_step(composed: Configure) -> Compile:
    """Read the step of a small model as compiled for TPUs, by its name in STEPS."""
    return make_stored(composed)
