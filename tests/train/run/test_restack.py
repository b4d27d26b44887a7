"""Checkpoints whose layers were stacked in another way."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.errors import DataError
from model.pattern import segments_of
from tests.train.run.conftest import ABOUT
from tests.train.run.states import same
from train.config import CheckpointConfig
from train.core.program import Program
from train.run import checkpoint
from train.run.checkpoint import Checkpoints

EXPERTS = (
    *("model=moe_nano", "model.experts_every=2", "model.num_experts=4"),
    *("model.expert_dim=8", "model.num_heads=4", "model.embed_dim=16"),
)
# Where format 1 has the layers.
STACKS = {
    (): {"layers": [0, 1]},
    (*EXPERTS, "model.num_layers=5", "optimizer=muon", "optimizer.ema_decay=0.9"): {
        "dense_layers": [0],
        "layers_between": [1, 3],
        "layers": [2, 4],
    },
    # One slot has layers of two stacks.
    (*EXPERTS, "model.num_layers=3", "optimizer.moment_dtype=int8"): {
        "dense_layers": [0],
        "layers_between": [1],
        "layers": [2],
    },
}


def has_layers(node: object) -> bool:
    return isinstance(node, dict) and "layers" in node


def in_both_formats(program: Program, stacks: dict[str, list[int]]):
    """Return one state in formats 1 and 2, of which each layer's values differ."""
    slots = {
        (str(i), str(slot)): segment.layers(slot)
        for i, segment in enumerate(segments_of(program.config.model))
        for slot in range(len(segment.pattern))
    }
    nodes, tree = jax.tree.flatten(program.state, is_leaf=has_layers)

    def ones(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.ones(like.shape, like.dtype, device=like.sharding)

    def both(number: int, node):
        if not has_layers(node):
            return ones(node), ones(node)

        def stacked(layers, like):
            def fill(path, leaf):
                names = (f"{number}{jax.tree_util.keystr(path)}{n}" for n in layers)
                values = [zlib.crc32(name.encode()) % 97 for name in names]
                rows = [np.full(leaf.shape[1:], value) for value in values]
                return jax.device_put(np.stack(rows).astype(leaf.dtype), leaf.sharding)

            return jax.tree_util.tree_map_with_path(fill, like)

        def layer_like(layer):
            (found,) = (key for key, layers in slots.items() if layer in layers)
            return node["layers"][found[0]][found[1]]

        new = jax.tree.map(ones, node)
        for (segment, slot), layers in slots.items():
            like = node["layers"][segment][slot]
            new["layers"][segment][slot] = stacked(layers, like)
        old = {name: stacked(own, layer_like(own[0])) for name, own in stacks.items()}
        return {k: v for k, v in new.items() if k != "layers"} | old, new

    pairs = [both(number, node) for number, node in enumerate(nodes)]
    return [tree.unflatten(own) for own in zip(*pairs, strict=True)]


@pytest.mark.parametrize("overrides", STACKS, ids=["gpt", "experts", "int8"])
def test_a_checkpoint_of_format_1_is_restored(programs, folder, monkeypatch, overrides):
    program = programs(*overrides, devices=1)
    model, like = program.config.model, program.state
    old, new = in_both_formats(program, STACKS[overrides])
    checkpoints = Checkpoints(folder, CheckpointConfig())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 1)
        checkpoints.save(1, old, ABOUT)
    checkpoints.wait()
    same(checkpoints.saved.restore(like, model=model), new)
    step, params = checkpoints.saved.restore_params(like, model=model)
    assert step == 1
    same(params, new.optimizer.average or new.params)
    checkpoints.save(2, new._replace(step=new.step + 1), ABOUT)
    checkpoints.wait()
    same(checkpoints.saved.restore(like, model=model).params, new.params)
    checkpoints.close()


def test_a_later_format_is_refused(programs, folder, monkeypatch):
    program = programs(devices=1)
    checkpoints = Checkpoints(folder, CheckpointConfig())
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    checkpoints.save(0, program.init(), ABOUT)
    checkpoints.wait()
    with pytest.raises(DataError, match="has format 3"):
        checkpoints.saved.restore(program.state, model=program.config.model)
    checkpoints.close()
