"""What a step has to send, by the textbook, without a compiler.

Of each layer, each microbatch: a matrix that is cut over the batch's axes (`fsdp`) is
gathered, rounded, forward and backward, and its gradient, float32, is reduced and
scattered; along the batch's other axes (`data`) gradients are all-reduced. Where heads
or MLP are cut (`tensor`) activations are all-reduced once forward and once backward for
attention and MLP each; `remat=full` repeats the first of them.

Outside the layers: the head is gathered and its gradient reduced once a microbatch. A
table cut along its width is looked up by ids gathered from all rows, and the result
exchanged all-to-all. Muon exchanges matrices for whole ones, twice, or gathers them for
both products of each of its steps where the devices do not divide the layers.

Definitions of payload and sent: train/plan/cost.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from train.config import Remat
from train.plan.estimated.local_step import Axes, Share, Weight, is_muons

FLOAT32 = 4
_SCALARS = 3  # number of targets, loss, norm of the gradient


@dataclass(frozen=True)
class Exchange:
    """Equal collectives of a step; `payload` is of all of them."""

    axes: Axes
    kind: str
    count: int
    payload: float
    serves: str
    in_layers: bool = False


def exchanges(share: Share, platform: str, muon: bool) -> list[Exchange]:
    """List what a device sends in a step."""
    found = [
        *(e for w in share.weights for e in _of_weight(share, w, platform)),
        *_of_activations(share),
        *_of_embedding(share),
        *_of_loss(share),
    ]
    if muon:
        found += [
            e for w in filter(is_muons, share.weights) for e in _of_muon(share, w)
        ]
    return [e for e in found if share.ways(e.axes) > 1 and e.payload]


def _of_weight(share: Share, weight: Weight, platform: str) -> Iterator[Exchange]:
    """Gather a weight, and reduce its gradient; a tied table's look-up and head each.

    What is looked up is not gathered: its rows are exchanged (`_of_embedding`).
    """
    looked_up = weight.name == "embedding.weight"
    if looked_up:
        yield from _reduced(share, weight, platform, "embedding")
    if weight is share.head or not looked_up:
        use = "head" if weight is share.head else _use(weight)
        yield from _gathered(share, weight, platform, use)
        yield from _reduced(share, weight, platform, use)


def _gathered(
    share: Share, weight: Weight, platform: str, use: str
) -> Iterator[Exchange]:
    """Gather a matrix rounded, anything else as it is.

    XLA's GPU compiler gathers once more for what is recomputed; the last product of a
    layer is not.
    """
    times = share.microbatches
    if weight.in_layers:
        last = weight.name.startswith("layers.mlp.down")
        full = share.how.remat == Remat.full
        times *= 3 if platform == "gpu" and full and not last else 2
    rounded = weight.is_matrix and weight.name != "positions.weight"
    width = share.how.compute_dtype.itemsize if rounded else weight.itemsize
    payload = times * weight.size * width
    yield _each(share, weight, use, weight.gathered, "all-gather", times, payload)


def _reduced(
    share: Share, weight: Weight, platform: str, use: str
) -> Iterator[Exchange]:
    """Reduce a gradient: TPU's and GPU's scatter what each device keeps a part of."""
    times, batch = share.microbatches, share.cut("batch")
    payload = times * weight.size * FLOAT32
    parts = tuple(axis for axis in weight.gathered if axis in batch)
    if parts and use != "embedding":
        small = not weight.is_matrix or weight.name == "positions.weight"
        kind = "all-reduce" if small or platform == "cpu" else "reduce-scatter"
        yield _each(share, weight, use, parts, kind, times, payload)
    copies = tuple(axis for axis in batch if axis not in weight.gathered)
    payload /= share.ways(weight.gathered)
    yield _each(share, weight, use, copies, "all-reduce", times, payload)


def _each(
    share: Share, of: Weight, use: str, axes: Axes, kind: str, times: int, total: float
) -> Exchange:
    count = times * (share.model.num_layers if of.in_layers else 1)
    return Exchange(axes, kind, count, total, use, of.in_layers)


def _use(weight: Weight) -> str:
    parts = [p for p in weight.name.split(".") if p not in ("layers", "weight")]
    return ".".join(p for p in parts if p != "scale")


def _of_activations(share: Share) -> Iterator[Exchange]:
    width = share.how.activation_dtype.itemsize
    hidden = share.tokens * share.model.embed_dim * width * share.microbatches
    layers = share.model.num_layers
    for axis, use in (("heads", "attention"), ("mlp", "mlp")):
        again = axis == "heads" and share.how.remat == Remat.full
        times = layers * (3 if again else 2)
        count = times * share.microbatches
        yield Exchange(share.cut(axis), "all-reduce", count, times * hidden, use, True)


def _of_embedding(share: Share) -> Iterator[Exchange]:
    table = share.weight("embedding.weight")
    hidden = share.tokens * share.model.embed_dim * share.microbatches
    count = share.microbatches
    yield Exchange(
        share.cut("vocab"), "all-reduce", count, hidden * FLOAT32, "embedding"
    )
    if table.gathered:
        ids = share.tokens * share.ways(table.gathered) * FLOAT32 * count
        yield Exchange(table.gathered, "all-gather", 2 * count, 2 * ids, "embedding")
        given = hidden * (FLOAT32 + share.how.activation_dtype.itemsize)
        yield Exchange(table.gathered, "all-to-all", 2 * count, given, "embedding")


def _of_loss(share: Share) -> Iterator[Exchange]:
    """A cut vocabulary: its largest logit, two sums, and the features' cotangent."""
    tiles = share.length // share.tile * share.microbatches
    positions = share.tokens * share.microbatches * FLOAT32
    vocab, batch = share.cut("vocab"), share.cut("batch")
    cotangent = positions * share.model.embed_dim
    yield Exchange(vocab, "all-reduce", tiles, cotangent, "head")
    yield Exchange(vocab, "all-reduce", 3 * tiles, 3 * positions, "head")
    yield Exchange(batch, "all-reduce", _SCALARS, _SCALARS * FLOAT32, "scalars")


def _of_muon(share: Share, weight: Weight) -> Iterator[Exchange]:
    shard = math.prod(weight.shard)
    exchanged = tuple(axis for axis in share.spread if axis in weight.held)
    copied = tuple(axis for axis in share.spread if axis not in weight.held)
    kept = tuple(axis for axis in weight.held if axis not in share.spread)
    if exchanged:
        given = 2 * shard * FLOAT32
        yield Exchange(exchanged, "all-to-all", 2, given, "muon")
    if copied:
        whole = shard * FLOAT32
        yield Exchange(copied, "all-gather", 1, whole, "muon")
    if kept:
        whole = shard * share.ways(kept) / share.ways(copied)
        width = share.how.compute_dtype.itemsize
        payload = whole * (10 * width + FLOAT32)
        yield Exchange(kept, "all-gather", 11, payload, "muon")
