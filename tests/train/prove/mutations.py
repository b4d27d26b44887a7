"""Faults of parallel programs, each planted into one function of the product."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from model import gpt
from model.attention.inputs import Chunks
from model.gather import WeightPlacement
from model.params import Kind
from model.parts import attention, pipeline
from model.parts.context import context_parallel
from model.parts.experts import exchange
from model.parts.experts.local_experts import LocalExperts
from model.placement import Placement
from train.core import program
from train.core import step as step_module
from train.core.loss.form import LossOptions
from train.optimizers import muon
from train.prove import parity

DENSE = ("model.num_layers=2", "model.embed_dim=16", "model.num_kv_heads=2")
BIASED = (*DENSE, "model.bias=true", "model.norm=layernorm")
NEAR = (*DENSE, "model.layer_pattern=[local,global]", "model.window=5")
DROPPING = (*DENSE, "model.dropout.residual=0.2")
MOE = (
    *("model=moe_nano", "model.num_layers=2", "model.dense_layers=0"),
    *("model.num_heads=4", "model.embed_dim=16", "model.expert_dim=8"),
    *("model.init=scaled", "model.bias=true", "model.layer_unroll=1"),
)
MUON = (*DENSE, "optimizer=muon")
AUX = (*MOE, "model.router_aux_weight=0.1")

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutation(NamedTuple):
    """A planted fault, and the report that it must lead to.

    first: The first difference begins with this.
    cause: The report names at least one of these, and no other.
    """

    name: str
    model: tuple[str, ...]
    mesh: str
    patch: Patch
    first: str
    cause: tuple[str, ...]


def size(axis: str) -> int:
    """Return the number of devices along a mesh axis, or 1 if it is not manual."""
    try:
        return jax.lax.psum(1, axis)
    except NameError:
        return 1


def index(axis: str) -> Any:
    """Return the device's index along a mesh axis, or 0 if it is not manual."""
    return jax.lax.axis_index(axis) if size(axis) > 1 else 0


def replace_function(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Return a patch that replaces a function with the result of `make` for it."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return patch


class Forgetful(Placement):
    """A placement whose replicas do not lie along `forgotten`."""

    forgotten = ""

    def replica_axes(self, axes):
        return tuple(a for a in super().replica_axes(axes) if a != self.forgotten)


def forget_axis(placement: Placement, axis: str) -> Placement:
    values = {field.name: getattr(placement, field.name) for field in fields(placement)}
    placement_type = type("Forgetful", (Forgetful,), {"forgotten": axis})
    return placement_type(**values)


def forget_replicas(kind: Kind, axis: str) -> Patch:
    """Return a patch that skips the sum of one kind's gradients along an axis."""

    def make(original):
        def reduce(grads, infos, execution):
            correct_grads = original(grads, infos, execution)
            placement = forget_axis(execution.placement, axis)
            partial_grads = original(
                grads, infos, execution._replace(placement=placement)
            )
            return jax.tree.map(
                lambda info, a, b: b if info.kind is kind else a,
                *(infos, correct_grads, partial_grads),
                is_leaf=lambda node: hasattr(node, "kind"),
            )

        return reduce

    return replace_function(step_module, "reduce_over_replicas", make)


def forget_in_sum(is_count: bool, axis: str) -> Patch:
    """Return a patch that skips the sum of counts, or of losses, along an axis."""

    def make(original):
        def sum_over_rows(sums, placement):
            leaf = jax.tree.leaves(sums)[0]
            if jnp.issubdtype(leaf.dtype, jnp.integer) is not is_count:
                return original(sums, placement)
            axes = tuple(a for a in placement.batch_axes if a != axis)
            return jax.tree.map(lambda x: jax.lax.psum(x, axes), sums)

        return sum_over_rows

    return replace_function(step_module, "sum_over_rows", make)


def equal_rows(original):
    def place(batch, like):
        sharding = like.inputs.sharding
        if sharding.mesh.shape["data"] > 1:
            half = len(batch.inputs) // 2
            batch = jax.tree.map(lambda x: x[[*range(half)] * 2], batch)
        return original(batch, like)

    return place


def local_norm(original):
    def make_train_step(model, optimizer, execution, *args, **options):
        step = original(model, optimizer, execution, *args, **options)
        norm = optax.tree.norm
        num_shards = execution.placement.mesh.shape["fsdp"]

        def train_step(state, batch):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(optax.tree, "norm", lambda x: norm(x) * num_shards**-0.5)
                return step(state, batch)

        return train_step

    return make_train_step


def seeds_by_shard(original):
    def run_per_device(function, execution, infos, result_specs):
        def shift_seeds(params, rows):
            if getattr(rows, "seeds_BT", None) is not None:
                rows = rows._replace(seeds_BT=rows.seeds_BT + 7 * index("data"))
            return function(params, rows)

        return original(shift_seeds, execution, infos, result_specs)

    return run_per_device


def reversed_ring(original):
    def ppermute(x, axis_name, perm):
        return original(x, axis_name, [(target, source) for source, target in perm])

    return ppermute


def wrong_experts(original):
    def run(chunk, experts):
        shift = 1 if experts.expert_axes else 0
        return original(chunk._replace(experts=chunk.experts + shift), experts)

    return run


def bias_on_each_shard(original):
    def add_bias(y, *args):
        biased = original(y, *args)
        return y + (biased - y) * size("tensor")

    return add_bias


def shards_of_muon(original):
    def map_whole(function, arrays, **options):
        def scale_by_shard(matrices):
            return function(matrices) * (1 + index("fsdp"))

        return original(scale_by_shard, arrays, **options)

    return map_whole


def without_segments(self):
    return None


def local_load(original):
    return property(lambda self: tuple(a for a in original.fget(self) if a != "data"))


def rolled_gather(original):
    def gather(self, shard):
        weight = original(self, shard)
        for dim, axes in self.sharded_dims:
            if "fsdp" in axes:
                weight = jnp.roll(weight, shard.shape[dim], dim)
        return weight

    return gather


def scatter_without(axis: str):
    def make(original):
        def reduce_scatter(self, gradient):
            axes = tuple(a for a in self.replica_axes if a != axis)
            return original(self._replace(replica_axes=axes), gradient)

        return reduce_scatter

    return make


def overlapping_microbatches(original):
    def split(rows, count):
        return jax.tree.map(lambda x: jnp.stack([x[0]] * count), original(rows, count))

    return split


def scaled_microbatches(original):
    def sum_microbatches(compute, params, parts, **sizes):
        grads, sums = original(compute, params, parts, **sizes)
        return jax.tree.map(lambda g: g / 2, grads), sums

    return sum_microbatches


def shifted_positions(original):
    def rotations(positions_BT, config):
        return original(positions_BT + 5 * index("context"), config)

    return rotations


def short_window(original):
    def attend(attend_rows, window, multiple, axes, inputs):
        return original(attend_rows, 2, multiple, axes, inputs)

    return attend


def rolled_heads(original):
    def all_to_all(x, axes, split, join, **options):
        y = original(x, axes, split, join, **options)
        is_context = "context" in jax.tree.leaves(axes) and size("context") > 1
        return jnp.roll(y, 1, axis=join) if is_context else y

    return all_to_all


def halved_padding_ids(original):
    def gather(self, weight):
        is_sharded = bool(self.head_placement.sharded_dims)
        return original(self, weight) * (0.5 if is_sharded else 1)

    return gather


def nan_on_shard(original):
    def reduce(grads, infos, execution):
        grads = original(grads, infos, execution)
        head = grads["head"]["weight"]
        weight_with_nan = head + jnp.where(index("fsdp") == 1, jnp.nan, 0.0)
        return grads | {"head": {"weight": weight_with_nan}}

    return reduce


def equal_stages(original):
    return lambda params, axis, repeats: params


def shared_expert_everywhere(original):
    def reduce(self, output):
        result = original(self, output)
        return result._replace(y=result.y * (2 if self.hidden_axes else 1))

    return reduce


def doubled_lookup(original):
    def look_up(lookups, execution):
        x = original(lookups, execution)
        return jnp.where(index("data") == 1, jnp.roll(x, 1, 1), x)

    return look_up


PAIR = "data=2 fsdp=2"
CUBE = "data=2 fsdp=2 tensor=2"
RING = "fsdp=2 context=2"
LONG_RING = "context=4 data=2"
FIRST_MATRIX = "gradient layers.0.0.attention.query.weight"
skip_ring_order = replace_function(
    attention, "in_ring_order", lambda original: lambda x, axes: x
)
MUTATIONS = [
    Mutation(
        *("targets of one shard only", DENSE, PAIR, forget_in_sum(True, "data")),
        *("counts of targets", ("data",)),
    ),
    Mutation(
        *("targets of half a row only", DENSE, RING, forget_in_sum(True, "context")),
        *("counts of targets", ("context",)),
    ),
    Mutation(
        *("loss of one shard only", DENSE, CUBE, forget_in_sum(False, "fsdp")),
        *("loss", ("fsdp",)),
    ),
    Mutation(
        *("no sum of scales", DENSE, CUBE, forget_replicas(Kind.vector, "data")),
        *("gradient layers.0.0.attention_norm.scale", ("data",)),
    ),
    Mutation(
        *("no sum of biases", BIASED, RING, forget_replicas(Kind.vector, "context")),
        *("gradient layers.0.0.attention_norm.scale", ("context",)),
    ),
    Mutation(
        *("no sum of tables", DENSE, CUBE, forget_replicas(Kind.table, "data")),
        *("gradient embedding.weight", ("data",)),
    ),
    Mutation(
        *("no sum in layers", DENSE, PAIR),
        replace_function(WeightPlacement, "reduce_scatter", scatter_without("data")),
        *(FIRST_MATRIX, ("data",)),
    ),
    Mutation(
        *("no sum after microbatches", DENSE),
        "data=2 train.accumulation_steps=2",
        forget_replicas(Kind.matrix, "data"),
        *(FIRST_MATRIX, ("data", "train.accumulation_steps")),
    ),
    Mutation(
        *("shards in wrong order", DENSE, PAIR),
        replace_function(WeightPlacement, "gather", rolled_gather),
        *("loss", ("fsdp",)),
    ),
    Mutation(
        *("head gathered wrongly", DENSE, PAIR),
        replace_function(LossOptions, "gather", halved_padding_ids),
        *("loss", ("fsdp",)),
    ),
    Mutation(
        *("rows twice", DENSE, PAIR),
        replace_function(parity, "place", equal_rows),
        *("counts of targets", ("data",)),
    ),
    Mutation(
        *("embedding of neighbours", DENSE, CUBE),
        replace_function(gpt, "look_up", doubled_lookup),
        *("loss", ("data",)),
    ),
    Mutation(
        *("NaN on a shard", DENSE, PAIR),
        replace_function(step_module, "reduce_over_replicas", nan_on_shard),
        *("gradient head.weight", ("fsdp",)),
    ),
    Mutation(
        *("norm of a shard", DENSE, CUBE),
        replace_function(program, "make_train_step", local_norm),
        *("metric grad_norm", ("fsdp",)),
    ),
    Mutation(
        *("Muon by shard", MUON, PAIR),
        replace_function(muon, "map_whole_matrices", shards_of_muon),
        *("update layers.", ("fsdp",)),
    ),
    Mutation(
        *("dropout by shard", DROPPING, PAIR),
        replace_function(step_module, "run_per_device", seeds_by_shard),
        *("metric grad_norm", ("data",)),
    ),
    Mutation(
        *("microbatches overlap", DENSE, "fsdp=2 train.accumulation_steps=2"),
        replace_function(step_module, "split", overlapping_microbatches),
        *("loss", ("train.accumulation_steps",)),
    ),
    Mutation(
        *("scale of microbatches", DENSE, "fsdp=2 train.accumulation_steps=2"),
        replace_function(step_module, "sum_over_microbatches", scaled_microbatches),
        *("gradient embedding.weight", ("train.accumulation_steps",)),
    ),
    Mutation(
        *("positions by shard", DENSE, RING),
        replace_function(gpt, "make_rotations", shifted_positions),
        *("loss", ("context",)),
    ),
    Mutation(
        *("ring ignores documents", DENSE, RING),
        lambda patch: patch.setattr(
            Chunks, "same_document_BTS", property(without_segments)
        ),
        *("loss", ("context",)),
    ),
    Mutation(
        *("rows not in ring order", DENSE, RING, skip_ring_order, "loss", ("context",))
    ),
    Mutation(
        *("ring runs backwards", DENSE, LONG_RING),
        replace_function(jax.lax, "ppermute", reversed_ring),
        *("loss", ("context",)),
    ),
    Mutation(
        *("window too short on the ring", NEAR, RING),
        replace_function(context_parallel, "attend_in_window", short_window),
        *("loss", ("context",)),
    ),
    Mutation(
        *("heads exchanged wrongly", DENSE, f"{RING} context_attention=ulysses"),
        replace_function(jax.lax, "all_to_all", rolled_heads),
        *("loss", ("context",)),
    ),
    Mutation(
        *("stages send backwards", (*DENSE, "model.num_layers=4"), "pipeline=4 data=2"),
        replace_function(jax.lax, "ppermute", reversed_ring),
        *("loss", ("pipeline",)),
    ),
    Mutation(
        *("groups of layers on wrong stages", (*DENSE, "model.num_layers=4")),
        "pipeline=2 fsdp=2 pipeline_repeats=2",
        replace_function(pipeline, "interleave_layers", equal_stages),
        *("loss", ("pipeline",)),
    ),
    Mutation(
        *("load of one shard", MOE, "data=2 expert=2"),
        replace_function(Placement, "layer_batch_axes", local_load),
        *("counts of experts' tokens", ("data",)),
    ),
    Mutation(
        *("balance of one shard", AUX, "data=2 expert=2"),
        replace_function(Placement, "layer_batch_axes", local_load),
        *("counts of experts' tokens", ("data",)),
    ),
    Mutation(
        *("tokens reach other experts", MOE, "data=2 expert=2"),
        replace_function(exchange, "run_local_experts", wrong_experts),
        *("loss", ("expert",)),
    ),
    Mutation(
        *("bias on each shard", MOE, "expert=2 tensor=2"),
        replace_function(exchange, "add_bias", bias_on_each_shard),
        *("loss", ("tensor",)),
    ),
    Mutation(
        *("experts' sum twice", MOE, "expert=2 tensor=2"),
        replace_function(LocalExperts, "reduce", shared_expert_everywhere),
        *("loss", ("tensor",)),
    ),
    Mutation(
        *("no sum of experts' tables", MOE, "data=2 expert=2"),
        forget_replicas(Kind.table, "expert"),
        *("gradient embedding.weight", ("expert",)),
    ),
]
