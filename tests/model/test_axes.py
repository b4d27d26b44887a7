"""Rules from what a dim is to where it lies."""

import pytest
from jax.sharding import PartitionSpec

from model.axes import partition_spec
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


def test_logical_axes_are_no_mesh_axes():
    from train.config import MESH_AXES

    assert not set(LOGICAL_AXES) & set(MESH_AXES)
