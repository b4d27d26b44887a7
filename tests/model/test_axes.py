"""Rules map the logical axes of dims to mesh axes."""

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


@pytest.mark.parametrize(
    ("axes", "named"),
    [(("batch", "experts"), "experts"), (("heads", "mlp"), "tensor")],
)
def test_a_missing_rule_and_two_dims_on_one_axis_are_errors(axes, named):
    with pytest.raises(ValueError, match=f"axis '{named}'"):
        partition_spec(TABLE, axes)


def test_a_list_leaves_out_the_axis_that_is_the_whole_rule_of_another_dim():
    table = {**TABLE, "embed": ("fsdp", "expert"), "experts": "expert", "mlp": None}
    assert partition_spec(table, ("embed", "mlp")) == PartitionSpec(
        ("fsdp", "expert"), None
    )
    assert partition_spec(table, ("experts", "embed", "mlp")) == PartitionSpec(
        "expert", ("fsdp",), None
    )
    # Two lists with one axis stay an error, and so do two dims with the same rule.
    with pytest.raises(ValueError, match="axis 'fsdp'"):
        partition_spec(table, ("batch", "embed"))


def test_logical_axes_are_not_mesh_axes():
    from train.config import MESH_AXES

    assert not set(LOGICAL_AXES) & set(MESH_AXES)
