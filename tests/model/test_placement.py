"""A placement says which mesh axes are manual and how they shard arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from model.axes import AxisRules
from model.placement import Placement

RULES = AxisRules(
    (("batch", ("data", "fsdp")), ("seq", "context"), ("mlp", "tensor")),
    (("embed", ("fsdp", "context")), ("mlp", "tensor"), ("layers", None)),
)


def make_placement(**sizes: int) -> Placement:
    axis_types = (AxisType.Auto,) * len(sizes)
    return Placement(
        AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types), RULES
    )


def test_the_axes_that_shard_the_batch_are_manual():
    placement = make_placement(data=2, fsdp=4, context=1, tensor=2)
    assert placement.batch_axes == ("data", "fsdp")
    assert placement.manual_axes == {"data", "fsdp", "context"}
    assert placement.spec("batch", "mlp") == PartitionSpec(None, "tensor")
    assert placement.param_spec(("embed", "mlp")) == PartitionSpec(None, "tensor")
    assert placement.sharded_dims(("embed", "mlp")) == ((0, ("fsdp",)),)
    assert placement.replica_axes(("embed", "mlp")) == ("data",)


def test_without_a_tensor_axis_nothing_is_left_to_xla():
    placement = make_placement(data=2, fsdp=1, context=2, tensor=1)
    assert placement.manual_axes == {"data", "fsdp", "context", "tensor"}
    assert placement.sequence_axes == ("context",)
    x = jnp.ones((2, 3))
    assert placement.constrain(x, "batch", "mlp") is x


def test_no_axis_is_manual_if_the_batch_is_not_sharded():
    placement = make_placement(data=1, fsdp=1, context=1, tensor=4)
    assert placement.manual_axes == set()
    assert placement.automatic_axes == ("tensor",)
    assert placement.sharded_dims(("embed",)) == ()


def test_rules_shard_an_activation_over_the_automatic_axes():
    mesh = jax.make_mesh((1, 8), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = AxisRules((("batch", "data"), ("seq", None), ("mlp", "tensor")))
    placement = Placement(mesh, rules)
    y = jax.jit(lambda x: placement.constrain(x, "batch", None, "mlp"))(
        np.ones((4, 3, 8), np.float32)
    )
    with pytest.raises(ValueError, match="no rule"):
        placement.constrain(y, "batch", None, "vocab")
    assert y.addressable_shards[0].data.shape == (4, 3, 1)
