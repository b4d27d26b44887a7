"""Everything that `jit` needs to run a model on a mesh.

Training, evaluation, sampling and the plan all run a `Program`, so that the plan
describes the program that runs. train/resolve makes it from a config.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.batch import Batch
from model.count import num_active_params, num_params
from model.execution import Execution
from model.gpt import GPT
from model.model_parts import ModelParts
from train.core.eval_step import make_eval_step
from train.core.layout import BatchShards, StateLayout, moments_of, state_shardings
from train.core.model_flops import mixer_flops, weight_flops
from train.core.optimizer.update import Optimizer
from train.core.recipe import Recipe
from train.core.state import TrainState, abstract_state, initial_state
from train.core.step import make_train_step


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model, and everything that `jit` needs to train it on a mesh.

    model: the abstract model.
    parts: the functions that made the parts of `model`.
    infos: tree of `ParamInfo`, shaped like the parameters.
    state, batch: trees of `jax.ShapeDtypeStruct` with shardings.
    seed: the seed of the initial state and of the random numbers of a step.
    compiler_options: the options of XLA for the training step.
    num_tokens: the number of ids that the tokenizer has. None means that it has all ids
        of the vocabulary.
    """

    model: GPT
    parts: ModelParts
    infos: Any
    layout: StateLayout
    execution: Execution
    recipe: Recipe
    optimizer: Optimizer
    state: TrainState
    batch: Batch
    seed: int
    compiler_options: dict[str, bool | str]
    num_tokens: int | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the program runs."""
        return self.layout.mesh

    @property
    def shardings(self) -> TrainState:
        """The sharding of each leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @functools.cached_property
    def init(self):
        """Jitted: () -> the state of step 0, created with its shardings."""
        init_fn = functools.partial(self.initial_state, self.seed)
        return jax.jit(init_fn, out_shardings=self.shardings)

    def initial_state(self, seed: int) -> TrainState:
        """Return the state of step 0 of a run with this seed. Call it under `jit`."""
        model = self.model.config
        return initial_state(model, self.parts, self.optimizer, self.recipe, seed)

    @functools.cached_property
    def train_step(self):
        """Jitted: (state, batch) -> (state, metrics); the old state is donated."""
        return self._jit_step(watched=False)

    @functools.cached_property
    def watched_step(self):
        """Jitted: a train step that adds layer statistics (train/core/numerics.py)."""
        return self._jit_step(watched=True)

    def _jit_step(self, watched: bool):
        step = make_train_step(
            self.model,
            self.optimizer,
            self.execution,
            self.recipe,
            self.seed,
            watched=watched,
            num_tokens=self.num_tokens,
        )
        return jax.jit(
            step,
            in_shardings=(self.shardings, self.batch_shardings),
            out_shardings=(self.shardings, self.replicated),
            donate_argnums=0,
            compiler_options=self.compiler_options,
        )

    @functools.cached_property
    def eval_step(self):
        """Jitted: (params, batch) -> (nats, targets)."""
        recipe = self.recipe
        step = make_eval_step(self.model, self.execution, recipe, self.num_tokens)
        return jax.jit(
            step,
            in_shardings=(self.shardings.params, self.batch_shardings),
            out_shardings=self.replicated,
        )

    @property
    def host_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaves of the state that are in host memory, by name."""
        return dict(moments_of(self.state)) if self.layout.offload else {}

    @property
    def batch_shardings(self) -> Batch:
        """The sharding of each field of a batch."""
        return jax.tree.map(lambda field: field.sharding, self.batch)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in a global batch."""
        return self.batch.inputs.size

    @functools.cached_property
    def num_params(self) -> int:
        """The number of parameters, excluding the rows that only pad the vocabulary."""
        return num_params(self.model)

    @functools.cached_property
    def num_active_params(self) -> int:
        """The number of parameters that one token uses."""
        return num_active_params(self.model)

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of a step (convention: train/core/model_flops.py)."""
        model = self.model.config
        length = self.batch.inputs.shape[1]
        per_token = weight_flops(model, self.state.params, self.infos)
        per_token += mixer_flops(model, self.parts.mixers, length)
        return per_token * self.tokens_per_step

    @property
    def batch_shards(self) -> BatchShards:
        """How many shards the batch has along its rows and along positions."""
        return self.layout.batch_shards


def sharded_state(
    model: GPT,
    parts: ModelParts,
    layout: StateLayout,
    optimizer: Optimizer,
    recipe: Recipe,
) -> TrainState:
    """Return the train state as `jax.ShapeDtypeStruct` leaves with their shardings."""
    state = abstract_state(model.config, parts, optimizer, recipe)
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        state,
        state_shardings(state, layout),
    )
