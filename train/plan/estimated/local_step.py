"""One device's share of a program: its rows, its part of each layer, its weights.

A dim of a weight that the table for activations puts on the same mesh axes as the one
for parameters stays cut while it multiplies (heads, MLP and vocabulary over `tensor`).
Over the other axes of the parameter it is gathered first (`fsdp`).
"""

import functools
import math
from dataclasses import dataclass, replace

from model.axes import MeshAxes, mesh_axes
from model.config import ModelConfig
from model.layers import Execution
from model.params import STACKED, Kind, ParamInfo, named
from train.loss import tile
from train.program import Program
from train.sharding import num_shards, param_specs, rule_table

Axes = tuple[str, ...]
_CUT = ("batch", "heads", "mlp", "vocab")


@dataclass(frozen=True)
class Weight:
    """A parameter; shapes with a leading dim that counts layers, if it has one.

    whole, shard, used: its shape, that of what a device holds and of what it uses.
    held: the mesh axes that cut it; gathered: those along which devices gather it.
    itemsize: bytes of an element.
    """

    name: str
    info: ParamInfo
    whole: tuple[int, ...]
    shard: tuple[int, ...]
    used: tuple[int, ...]
    held: Axes
    gathered: Axes
    itemsize: int

    @property
    def in_layers(self) -> bool:
        """Whether each layer has one."""
        return self.name.startswith(f"{STACKED}.")

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies, rounded to the compute dtype: no scale, no bias."""
        return self.info.kind is not Kind.vector

    @property
    def size(self) -> int:
        """Elements that a device uses."""
        return math.prod(self.used)


@dataclass(frozen=True)
class Share:
    """What one device does in one microbatch.

    model: the heads, the MLP's and the vocabulary's part that it computes.
    how: execution, without rules.
    rows, length: of its part of a microbatch, B and T.
    tile: positions of a row whose logits exist at once, C.
    documents: whether attention stays inside them.
    microbatches: of a step.
    sizes: of the mesh axes.
    cuts: of rows, heads, MLP and vocabulary, the mesh axes that cut them.
    """

    model: ModelConfig
    how: Execution
    rows: int
    length: int
    tile: int
    documents: bool
    microbatches: int
    weights: tuple[Weight, ...]
    sizes: tuple[tuple[str, int], ...]
    cuts: tuple[tuple[str, Axes], ...]

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.rows * self.length

    @property
    def head(self) -> Weight:
        """The table that makes logits."""
        name = "embedding.weight" if self.model.tied_head else "head.weight"
        return self.weight(name)

    @property
    def spread(self) -> Axes:
        """The mesh axes over which Muon spreads the layers (train/optimizer.py)."""
        axes: Axes = ()
        for axis, size in self.sizes:
            if size > 1 and self.model.num_layers % (size * self.ways(axes)) == 0:
                axes = (*axes, axis)
        return axes

    def weight(self, name: str) -> Weight:
        """Find a weight by its name."""
        return next(w for w in self.weights if w.name == name)

    def cut(self, axis: str) -> Axes:
        """Give the mesh axes that cut a logical axis of activations."""
        return dict(self.cuts)[axis]

    def ways(self, axes: Axes) -> int:
        """Count the devices along some mesh axes."""
        return math.prod(dict(self.sizes)[axis] for axis in axes)


def is_muons(weight: Weight) -> bool:
    """Say whether Muon orthogonalizes a weight, if the optimizer is Muon."""
    return weight.info.kind is Kind.matrix and weight.in_layers


def sides(weight: Weight) -> tuple[int, int]:
    """Give the smaller and the larger side of one layer's matrix."""
    split = 1 + weight.info.inputs
    both = math.prod(weight.whole[1:split]), math.prod(weight.whole[split:])
    return min(both), max(both)


def share_of(program: Program) -> Share:
    """Cut a program to what one device does of it."""
    config, mesh = program.config, program.mesh
    rules = rule_table(config.mesh.activations)

    def cut(size: int, axis: str) -> int:
        return size // math.gcd(size, num_shards(mesh.shape, rules[axis]))

    model = config.model
    assert model.vocab_size is not None, "settled"
    local = replace(
        model,
        num_heads=cut(model.num_heads, "heads"),
        num_kv_heads=cut(model.kv_heads, "kv_heads"),
        head_dim=model.head_size,
        mlp_dim=cut(model.mlp_size, "mlp"),
        vocab_size=cut(model.vocab_size, "vocab"),
    )
    batch, train = config.data, config.train
    rows = batch.batch_size // num_shards(mesh.shape, rules["batch"])
    return Share(
        model=local,
        how=program.how._replace(rules=Execution().rules),
        rows=rows // train.accumulation_steps,
        length=batch.sequence_length,
        tile=tile(batch.sequence_length, model.vocab_size, train.loss_chunk_tokens),
        documents=batch.document_mask,
        microbatches=train.accumulation_steps,
        weights=tuple(_weights(program)),
        sizes=tuple(mesh.shape.items()),
        cuts=tuple((axis, _wide(program, rules[axis])) for axis in _CUT),
    )


def _weights(program: Program):
    table = program.config.mesh.params
    rules = rule_table(program.config.mesh.activations) | {"layers": None}
    params, mesh = program.state.params, program.mesh
    specs = param_specs(params, program.infos, mesh.shape, table)
    cut = functools.partial(_cut, program)
    leaves = zip(
        named(params),
        named(program.infos, lambda x: isinstance(x, ParamInfo)),
        named(specs, lambda x: not isinstance(x, dict)),
        strict=True,
    )
    for (name, param), (_, info), (_, spec) in leaves:
        held = [_wide(program, entry) for entry in spec]
        kept = [_wide(program, rules[axis]) for axis in info.axes]
        yield Weight(
            name=name,
            info=info,
            whole=param.shape,
            shard=cut(param.shape, held),
            used=cut(param.shape, kept),
            held=tuple(axis for axes in held for axis in axes),
            gathered=tuple(
                axis
                for axes, keeps in zip(held, kept, strict=True)
                for axis in axes
                if axis not in keeps
            ),
            itemsize=param.dtype.itemsize,
        )


def _cut(program: Program, shape: tuple[int, ...], axes: list[Axes]) -> tuple[int, ...]:
    parts = [math.prod(program.mesh.shape[a] for a in of) for of in axes]
    return tuple(-(-dim // part) for dim, part in zip(shape, parts, strict=True))


def _wide(program: Program, entry: MeshAxes) -> Axes:
    """Give the mesh axes of a rule that are more than one device wide."""
    return tuple(axis for axis in mesh_axes(entry) if program.mesh.shape[axis] > 1)
