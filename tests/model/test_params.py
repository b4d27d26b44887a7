"""The information on each parameter names its axes, kind and layers."""

import jax
import jax.numpy as jnp

from model.config import LOGICAL_AXES
from model.gpt import params_of
from model.params import (
    Kind,
    ParamInfo,
    in_layer_order,
    name_in_layer,
    named,
    param_infos,
)
from model.pattern import kinds_of


def infos(tiny) -> dict[str, ParamInfo]:
    tree = param_infos(tiny.model)
    return dict(named(tree, is_leaf=lambda x: isinstance(x, ParamInfo)))


def test_every_dim_of_every_parameter_has_a_logical_axis(tiny):
    params = dict(named(params_of(tiny.model)))
    infos_by_name = infos(tiny)
    assert infos_by_name.keys() == params.keys()
    config = tiny.config
    sizes = {
        "vocab": config.vocab_size,
        "embed": config.embed_dim,
        "heads": config.num_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "experts": config.num_experts,
        "seq": config.max_sequence_length,
    }
    assert {*sizes, "layers", "mlp"} == set(LOGICAL_AXES) - {"batch"}
    kinds = kinds_of(config)
    for name, param in params.items():
        layer_sizes = dict(sizes)
        info = infos_by_name[name]
        layer_sizes["layers"] = len(info.layers)
        layer_sizes["mlp"] = config.mlp_size
        # The shared expert has the same size, because there is only one.
        if info.layers and kinds[info.layers[0]].experts:
            layer_sizes["mlp"] = config.expert_size
        shape = tuple(layer_sizes[axis] for axis in info.axes if axis is not None)
        in_mixer = ".attention." in name
        if in_mixer and kinds[info.layers[0]].mixer != "attention":
            # Heads and dims of several sizes share an axis.
            assert param.ndim == len(info.axes), name
        elif config.attention_gate and name.endswith("query.weight"):
            assert param.shape == (*shape[:-1], 2 * shape[-1])
        else:
            assert param.shape == shape, name


def test_each_layer_has_its_parameters_once(tiny):
    experts = [kind.experts for kind in kinds_of(tiny.config)]
    for has_experts in {*experts}:
        numbers = [n for n, entry in enumerate(experts) if entry is has_experts]
        name = "router.weight" if has_experts else "mlp.up.weight"
        layers = [
            layer
            for entry, info in infos(tiny).items()
            if entry.startswith("layers.") and entry.endswith(name)
            for layer in info.layers
        ]
        assert sorted(layers) == numbers


def test_kinds_distinguish_matrices_tables_and_vectors(tiny):
    for name, info in infos(tiny).items():
        if name.endswith(("bias", "scale", "balance", "sinks", "taps", "A_log")):
            assert info.kind is Kind.vector, name
        elif name.startswith("layers."):
            assert info.kind is Kind.matrix, name
            assert info.inputs == (2 if name.endswith("output.weight") else 1), name
        else:
            assert info.kind is Kind.table, name


def test_values_of_slots_come_in_the_order_of_layers():
    slots = jnp.array([0.0, 3.0]), jnp.array([1.0, 4.0]), jnp.array([2.0, 5.0])
    assert in_layer_order(slots).tolist() == [0, 1, 2, 3, 4, 5]
    (first, *_) = slots
    assert in_layer_order([first]).tolist() == [0, 3]


def test_the_name_in_a_layer_is_the_same_for_all_segments():
    trees = (
        {"layers": {"0": {"0": {"up": 0}, "1": {"up": 0}}}},
        {"layers": {"10": {"2": {"up": 0}}}},
    )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path([*trees])]
    names = [name_in_layer(path[1:]) for path in paths]
    assert names == ["['layers']['up']"] * 3
    (path, _), *_ = jax.tree_util.tree_leaves_with_path({"head": {"weight": 0}})
    assert name_in_layer(path) == "['head']['weight']"
