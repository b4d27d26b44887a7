"""Some parameters of a model have a matrix for each head."""

import math

import pytest

from model.catalog import MODEL_PARTS
from model.gpt import abstract_gpt, params_of
from model.params import Kind, is_info, named, param_infos
from train.optimizers.matrix_dims import matrix_dims

# The options of a model with four heads, and the number of heads by projection.
CASES = {
    "attention": (["num_kv_heads=2"], {"query": 4, "key": 2, "value": 2}),
    "latent_attention": (["query_rank=16"], {"query_up": 4, "key_value_up": 4}),
    "gated_delta": (
        ["delta_key_heads=2", "delta_value_heads=4"],
        {"query": 2, "key": 2, "value": 4, "gate": 4},
    ),
}


@pytest.mark.parametrize("mixer", CASES)
def test_heads_that_are_outputs_have_their_own_matrices(configure, mixer):
    """The output projection and parameters without heads stay whole."""
    options, expected = CASES[mixer]
    overrides = (f"model.{option}" for option in [f"mixer={mixer}", *options])
    model = abstract_gpt(configure(overrides).model, MODEL_PARTS)
    shapes = dict(named(params_of(model)))
    heads = {}
    for name, info in named(param_infos(model), is_info):
        if info.kind is Kind.matrix:
            total_size, head_size = (
                math.prod(matrix_dims(info, per_head=flag).fans(shapes[name].shape))
                for flag in (False, True)
            )
            if total_size != head_size:
                heads[name.split(".")[-2]] = total_size // head_size
    assert heads == expected
