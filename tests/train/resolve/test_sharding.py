"""Every array has the sharding that the config declares."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.params import Kind, ParamInfo, named
from tests.train.conftest import CUBE
from train.core.layout import bytes_per_device
from train.errors import ConfigError


def mistakes(programs, overrides: list[str]) -> dict[str, tuple[object, str]]:
    with pytest.raises(ConfigError) as error:
        programs(overrides, devices=8)
    return {m.key: (m.value, m.rule) for m in error.value.mistakes}


def test_parameters_have_the_shardings_of_the_table(programs):
    program = programs(CUBE, devices=8)
    table = program.config.mesh.params
    infos = dict(named(program.infos, lambda x: isinstance(x, ParamInfo)))
    for name, leaf in named(program.state.params):
        axes = (table[axis] for axis in infos[name].axes)
        spec = PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in axes))
        expected = NamedSharding(program.mesh, spec)
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim)
    specs = specs_of(program)
    assert specs["layers.0.0.mlp.up.weight"] == PartitionSpec(
        "pipeline", "fsdp", "tensor"
    )
    assert specs["layers.0.0.mlp.down.weight"] == PartitionSpec(
        "pipeline", "tensor", "fsdp"
    )


def test_bytes_per_device_are_those_of_a_shard(programs):
    for _, leaf in named(programs(CUBE, devices=8).state):
        shard = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        assert bytes_per_device(leaf) == shard.size * leaf.dtype.itemsize


def test_all_that_does_not_divide_is_listed_at_once(programs):
    shape = ("model.num_heads=3", "model.embed_dim=30", "model.head_dim=8")
    result = mistakes(programs, [*shape, "mesh.fsdp=4", "mesh.tensor=2"])
    assert set(result) == {f"mesh.params.{x}" for x in ("embed", "heads", "kv_heads")}
    value, rule = result["mesh.params.embed"]
    assert value == "fsdp"
    assert "embed dim 30 of" in rule
    assert "on 4 devices" in rule


def test_what_is_no_expert_is_sharded_over_the_axis_of_experts_too(programs):
    moe = ("model=moe_nano", "mesh.fsdp=2", "mesh.expert=4")
    specs = specs_of(programs([*moe, "model.embed_dim=128"], devices=8))
    assert specs["embedding.weight"][1] == ("fsdp", "expert")
    assert specs["layers.0.0.attention.query.weight"][1] == ("fsdp", "expert")
    assert experts_spec(specs)[1:3] == ("expert", "fsdp")


def test_an_axis_of_experts_that_does_not_divide_the_embed_dim_keeps_copies(programs):
    moe = ("model=moe_nano", "mesh.fsdp=2", "mesh.expert=4")
    narrow = ("model.embed_dim=12", "model.num_heads=2", "model.head_dim=8")
    specs = specs_of(programs([*moe, *narrow], devices=8))
    assert specs["layers.0.0.attention.query.weight"][1] == "fsdp"
    assert experts_spec(specs)[1:3] == ("expert", "fsdp")


def experts_spec(specs: dict[str, PartitionSpec]) -> PartitionSpec:
    return next(spec for name, spec in specs.items() if name.endswith(".mlp.up"))


def specs_of(program) -> dict[str, PartitionSpec]:
    return {name: leaf.sharding.spec for name, leaf in named(program.state.params)}


def test_a_missing_rule_and_two_dims_on_one_axis_are_listed_at_once(programs):
    rules = ("~mesh.params.vocab", "mesh.params.head_dim=tensor")
    assert set(mistakes(programs, [*rules, *CUBE])) == {"mesh.params"}


def moments(state, fields: tuple[str, ...], params) -> dict:
    """Find the first or second moment of each parameter in the optimizer's state."""
    result = {}
    for path, leaf in by_path(state.optimizer.transform).items():
        for name in params:
            if any(f".{field}{name}" in path for field in fields):
                assert name not in result
                result[name] = leaf
    return result


def by_path(params) -> dict:
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_moment_has_the_sharding_of_its_parameter(programs, optimizer):
    program = programs(
        [f"optimizer={optimizer}", "optimizer.ema_decay=0.9", *CUBE], devices=8
    )
    params = by_path(program.state.params)
    state = program.state
    infos = by_path(program.infos)
    is_matrix = {path for path in params if infos[f"{path}.kind"] is Kind.matrix}
    names_with_nu = set(params) - (is_matrix if optimizer == "muon" else set())
    mu = moments(state, ("mu", "trace"), params)
    nu = moments(state, ("nu",), params)
    assert set(mu) == set(params)
    assert set(nu) == names_with_nu
    for tree in (mu, nu, by_path(state.optimizer.average)):
        for path, leaf in tree.items():
            param = params[path]
            assert (leaf.shape, leaf.sharding) == (param.shape, param.sharding)


@pytest.mark.parametrize(
    "optimizer", ["optimizer.moment_dtype=int8", "optimizer=adafactor"]
)
def test_maxima_and_means_keep_the_sharding_of_their_dims(programs, optimizer):
    state = programs([optimizer, *CUBE], devices=8).state
    up = state.params["layers"]["0"]["0"]["mlp"]["up"]["weight"]
    layers, inputs, outputs = up.shape
    spec = up.sharding.spec
    parts = set()
    for path, leaf in by_path(state.optimizer).items():
        if "['up']['weight']" in path:
            name = path.rpartition("]")[2]
            parts.add((name, leaf.shape, leaf.sharding.spec))
    assert parts - {(".codes", up.shape, spec)} == {
        (".rows", (layers, inputs, 1), PartitionSpec(*spec[:2], None)),
        (".columns", (layers, 1, outputs), PartitionSpec(spec[0], None, spec[2])),
    }
