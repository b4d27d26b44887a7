"""Muon's result is the same for any sharding and any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.params import Kind, ParamInfo
from train.optimizers.matrix_dims import matrix_dims
from train.optimizers.muon import orthogonalize
from train.optimizers.whole_matrices import map_whole_matrices

# All but the last have 3 layers. Some are wide, tall, or have heads or experts.
SHAPES = {
    "up": ((3, 16, 32), ("layers", "embed", "mlp"), 1),
    "down": ((3, 32, 16), ("layers", "mlp", "embed"), 1),
    "query": ((3, 16, 8, 4), ("layers", "embed", "heads", "head_dim"), 1),
    "output": ((3, 8, 4, 16), ("layers", "heads", "head_dim", "embed"), 2),
    "small": ((3, 16, 8), ("layers", "embed", "kv"), 1),
    "experts": ((3, 4, 16, 8), ("layers", "experts", "embed", "kv"), 1),
    "alone": ((16, 16), ("embed", "mlp"), 1),
}
FSDP = {"embed": "fsdp", "mlp": "tensor", "heads": "tensor", "experts": "expert"}
TABLES = {
    "fsdp": FSDP,
    "columns before rows": {"embed": "tensor", "mlp": "fsdp", "heads": "fsdp"},
    "a head's dims": {"embed": "fsdp", "head_dim": "tensor"},
    "two axes on a dim": {"embed": ("fsdp", "data")},
    "nothing": {},
}
FAST = [
    ((2, 2, 2, 1), "fsdp", False),
    ((2, 2, 2, 1), "fsdp", True),
    ((1, 4, 2, 1), "a head's dims", False),
]
SLOW = [
    ((1, 2, 2, 2), "fsdp", False),
    ((2, 2, 1, 2), "nothing", False),
    ((2, 2, 2, 1), "columns before rows", False),
    ((2, 4, 1, 1), "two axes on a dim", False),
    ((1, 4, 2, 1), "a head's dims", True),
    ((2, 2, 2, 1), "columns before rows", True),
]


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)
    arrays = [jnp.array(rng.normal(size=s), jnp.float32) for s, *_ in SHAPES.values()]
    infos = [ParamInfo(axes, Kind.matrix, n) for _, axes, n in SHAPES.values()]
    return arrays, infos


def orthogonalize_alone(arrays, infos, per_head):
    results = []
    for array, info in zip(arrays, infos, strict=True):
        if per_head and info.axes[-2:] == ("heads", "head_dim"):
            heads = [array[..., head, :] for head in range(array.shape[-2])]
            flat = [info._replace(axes=("layers", "embed", "head_dim"))] * len(heads)
            results.append(np.stack(orthogonalize_alone(heads, flat, per_head), -2))
            continue
        split = info.stack_dims + info.inputs
        fan_in = int(np.prod(array.shape[info.stack_dims : split]))
        matrices = array.reshape(-1, fan_in, int(np.prod(array.shape[split:])))
        outputs = [orthogonalize(m[None], jnp.float32) for m in matrices]
        results.append(np.stack(outputs).reshape(array.shape))
    return results


@pytest.mark.parametrize(
    ("shape", "table", "per_head"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_each_matrix_is_orthogonalized_whole_and_alone(drawn, shape, table, per_head):
    arrays, infos = drawn
    mesh = jax.make_mesh(
        shape,
        ("data", "fsdp", "tensor", "expert"),
        (jax.sharding.AxisType.Auto,) * 4,
    )
    specs = [PartitionSpec(*map(TABLES[table].get, i.axes)) for i in infos]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    sharded_arrays = jax.device_put(arrays, shardings)

    @jax.jit
    def map_sharded(arrays):
        return map_whole_matrices(
            lambda x: orthogonalize(x, jnp.float32),
            arrays,
            dims=[matrix_dims(info, per_head=per_head) for info in infos],
            specs=specs,
            mesh=mesh,
            dtype=jnp.float32,
        )

    expected = orthogonalize_alone(arrays, infos, per_head)
    for name, result, reference in zip(
        SHAPES, map_sharded(sharded_arrays), expected, strict=True
    ):
        np.testing.assert_allclose(result, reference, atol=3e-6, err_msg=name)
