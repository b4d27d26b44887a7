"""Rules from what a dim is to where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from model.axes import ANYWHERE, AxisRules, partition_spec
from model.config import LOGICAL_AXES

TABLE = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
}


def test_each_dim_lies_where_its_rule_says():
    spec = partition_spec(TABLE, ("batch", None, "heads", "head_dim"))
    assert spec == PartitionSpec(("data", "fsdp"), None, "tensor", None)
    assert partition_spec(TABLE, ()) == PartitionSpec()


def test_an_axis_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match="there is no rule for logical axis 'experts'"):
        partition_spec(TABLE, ("batch", "experts"))


@pytest.mark.parametrize("axes", [("heads", "mlp"), ("batch", "embed")])
def test_two_dims_on_one_mesh_axis_are_an_error(axes):
    with pytest.raises(ValueError, match=r"sharded over mesh axis '(tensor|fsdp)'"):
        partition_spec(TABLE, axes)


def test_empty_rules_leave_an_activation_alone():
    x = jnp.ones((2, 3))
    assert ANYWHERE.constrain(x, "batch", "no such axis") is x
    assert ANYWHERE.spec("batch", "no such axis") == PartitionSpec()


def test_rules_pin_an_activation_to_its_place():
    rules = AxisRules(tuple(TABLE.items()))
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: rules.constrain(x, "batch", None, "mlp"))(
            np.ones((4, 3, 8), np.float32)
        )
        with pytest.raises(ValueError, match="no rule"):
            rules.constrain(y, "batch", None, "vocab")
    assert y.sharding.spec == PartitionSpec(("data", "fsdp"), None, "tensor")
    assert y.addressable_shards[0].data.shape == (1, 3, 4)


def test_rules_can_be_part_of_what_jit_compares():
    assert hash(AxisRules((("batch", "data"),))) == hash(
        AxisRules((("batch", "data"),))
    )


def test_logical_axes_are_no_mesh_axes():
    from train.config import MESH_AXES

    assert not set(LOGICAL_AXES) & set(MESH_AXES)
