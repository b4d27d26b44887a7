"""What is known of each parameter besides its value."""

import jax.numpy as jnp

from model.config import LOGICAL_AXES
from model.gpt import params_of
from model.params import Kind, ParamInfo, in_layer_order, named, param_infos

STACKED = "layers.", "dense_layers.", "layers_between."


def infos(tiny) -> dict[str, ParamInfo]:
    tree = param_infos(tiny.model)
    return dict(named(tree, is_leaf=lambda x: isinstance(x, ParamInfo)))


def test_every_dim_of_every_parameter_has_a_logical_axis(tiny):
    params = dict(named(params_of(tiny.model)))
    found = infos(tiny)
    assert found.keys() == params.keys()
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
    for name, param in params.items():
        own, info = dict(sizes), found[name]
        own["layers"] = config.expert_layers or config.num_layers
        if name.startswith("dense_layers."):
            own["layers"] = config.dense_layers
        if name.startswith("layers_between."):
            own["layers"] = config.expert_layers * (config.experts_every - 1)
        own["mlp"] = config.mlp_size
        if config.expert_layers and name.startswith("layers.mlp."):
            own["mlp"] = config.expert_size  # the shared expert's too: it is one
        assert param.shape == tuple(own[axis] for axis in info.axes), name


def test_kinds_tell_matrices_from_tables_and_vectors(tiny):
    for name, info in infos(tiny).items():
        if name.endswith(("bias", "scale", "balance", "sinks")):
            assert info.kind is Kind.vector, name
        elif name.startswith(STACKED):
            assert info.kind is Kind.matrix, name
            assert info.inputs == (2 if name.endswith("output.weight") else 1), name
        else:
            assert info.kind is Kind.table, name


def test_values_of_stacks_come_in_the_order_of_layers():
    first, last = jnp.array([0.0]), jnp.array([3.0, 6.0])
    between = jnp.array([1.0, 2.0, 4.0, 5.0])
    stacks = {"layers": last, "dense_layers": first, "layers_between": between}
    assert in_layer_order(stacks).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert in_layer_order({"layers": last, "dense_layers": first}).tolist() == [0, 3, 6]
