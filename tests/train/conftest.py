"""Share tiny configs, texts and programs, so that each step is compiled once."""

import functools
import inspect
import json.decoder
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.batches import Order
from data.catalog import text_store
from data.sources import Sources, open_sources
from model.catalog import MODEL_PARTS
from model.gpt import GPT, params_of
from model.params import layer_trees
from tests.forks import Forks
from tests.train.compiled import Compile, make_compile, make_stored
from train.config import Config
from train.core.feed import place
from train.core.step import make_gradients
from train.hardware.devices import prepare
from train.resolve.program import ConfiguredProgram, make_program

TINY = (
    *("model.num_layers=2", "model.num_heads=4", "model.embed_dim=32"),
    *("model.init=scaled", "model.compute_dtype=float32", "model.layer_unroll=1"),
    *("data=text", "data.path=text", "data.sequence_length=32", "data.batch_size=8"),
    *("optimizer=adamw", "schedule.warmup_steps=2", "train.num_steps=20"),
    *("mesh=single", "tracker=none"),
    # Rows then have different numbers of targets.
    "data.document_start=false",
)

MOE = (
    *("model=moe_nano", "model.num_layers=2", "model.num_heads=4"),
    *("model.embed_dim=32", "model.expert_dim=24", "model.init=scaled"),
    *("model.layer_unroll=1", "data.batch_size=8"),
)
DEEP = ("model.num_layers=4", "model.embed_dim=16")
CUBE = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")

Configure = Callable[..., Config]
Programs = Callable[..., ConfiguredProgram]


@pytest.fixture
def planning() -> Iterator[None]:
    """Let this process compile for other machines, and forget it afterwards."""
    environment = dict(os.environ)
    cache = jax.config.jax_enable_compilation_cache
    prepare()
    yield
    os.environ.clear()
    os.environ.update(environment)
    jax.config.update("jax_enable_compilation_cache", cache)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Start commands, which compile as tests do. A command chooses how many devices."""
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    forks = Forks(environment)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def configure(composed: Configure) -> Configure:
    """Compose a tiny config from the presets and overrides."""

    @functools.cache
    def configure_once(overrides: tuple[str, ...]) -> Config:
        return composed([*TINY, *overrides])

    def configure(overrides: Sequence[str] = ()) -> Config:
        return configure_once(tuple(overrides))

    return configure


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write many short documents, so that documents end within most batches."""
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
    """Return the tokens of `text`."""
    cache = tmp_path_factory.mktemp("store")
    return open_sources(
        configure([f"data.path={text}", f"data.cache_dir={cache}"]).data, text_store
    )


@pytest.fixture(scope="session")
def programs(configure: Configure, store: Sources) -> Programs:
    """Return the program of a tiny config on the first `devices` devices."""

    @functools.cache
    def program_once(overrides: tuple[str, ...], devices: int) -> ConfiguredProgram:
        return make_program(configure(overrides), jax.devices()[:devices])

    def program(overrides: Sequence[str] = (), devices: int = 1) -> ConfiguredProgram:
        return program_once(tuple(overrides), devices)

    return program


@pytest.fixture(scope="module")
def gradients(programs: Programs, store: Sources) -> Callable:
    """Compute the gradients of a step: overrides -> (loss, gradients, expert loads).

    `batch` defaults to the first batch. `balance` is added to the bias of experts.
    """
    steps = {}

    def gradients(overrides, devices=8, batch=None, balance=None):
        program = programs(overrides, devices=devices)
        key = tuple(overrides)
        if key not in steps:
            step = make_gradients(program.model, program.execution, program.recipe)
            steps[key] = jax.jit(step)
        if batch is None:
            batch = Order(store, program.config.data, 0).read(0)
            assert (batch.targets < 0).any()  # documents end inside of rows
        params = params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))
        if balance is not None:
            router = layer_trees(params["layers"])[-1][-1]["mlp"]["router"]
            router["balance"] = router["balance"] + jnp.asarray(balance)
        params = jax.device_put(params, program.shardings.params)
        batch = place(batch, program.batch)
        result = jax.device_get(steps[key](params, batch))
        return result.losses[0], result.grads, result.load_LE

    return gradients


@pytest.fixture(scope="session")
def compile_step(composed: Configure) -> Compile:
    """Compile the step of a small model for this CPU, and read its text."""
    return make_compile(composed)


@pytest.fixture(scope="session")
def stored_step(composed: Configure) -> Compile:
    """Read the step of a small model as compiled for TPUs, by its name in STEPS."""
    return make_stored(composed)


def take_steps(program, store, state, num_steps: int):
    """Return the state after steps on real batches, and the metrics of each."""
    order = Order(store, program.config.data, 0)
    metrics = []
    state = jax.device_put(state, program.shardings)
    for step in range(int(state.step), int(state.step) + num_steps):
        batch = place(order.read(step), program.batch)
        state, step_metrics = program.train_step(state, batch)
        jax.block_until_ready((state, step_metrics))  # see train/core/loop.py
        metrics.append(jax.device_get(step_metrics))
    return state, metrics


def losses_of(program, store, state, num_steps: int = 20) -> list[float]:
    """Return the loss of each step on real batches."""
    _, metrics = take_steps(program, store, state, num_steps)
    return [float(step_metrics["loss"]) for step_metrics in metrics]


def distance(actual, expected) -> float:
    """Return the norm of the difference of two trees over the norm of the second."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    parts = [(np.float64(a) - b, np.float64(b)) for a, b in pairs]
    error, length = (sum(np.sum(p[i] ** 2) for p in parts) ** 0.5 for i in (0, 1))
    return error / length
