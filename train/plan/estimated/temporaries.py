"""Memory that a step needs besides its arguments, itemised, without a compiler.

Three moments are weighed; the one that needs most gives the items.

- `loss`: a tile's logits in float32 and their cotangent, the gathered head, its
  gradient before it is scattered.
- `layers`: the gradients of all layers, that of the head, which XLA scatters behind the
  loop over the layers, and the backward pass of one layer: the weights that it gathers
  (on TPU the next one's travel meanwhile), their gradients before they are scattered,
  and what its products read and write (`_one_layer`). There is none of the embedding
  yet.
- `update`: the gradients, and Muon's matrices.

At the first two lives what the layers kept (plan/estimated/residuals.py), the features,
and the sum over microbatches. TPU's tiles pad arrays (`tiled`); there the weights of
all layers are also rounded once, before the loop over them.
"""

import math
from collections.abc import Iterable

from model.config import Activation, Attention
from train.config import Remat
from train.plan.estimated.local_step import Share, Weight, is_muons, sides
from train.plan.estimated.residuals import Residual, kept

_LANES, _SUBLANES = 128, 8
FLOAT32 = 4


def temporaries(share: Share, platform: str, muon: bool) -> dict[str, int]:
    """Give bytes by what holds them at the step's peak."""
    model = _model(share, platform)
    moments = [
        model | _loss(share, platform),
        model | _layers(share, platform),
        _update(share, platform, muon),
    ]
    return max(moments, key=lambda items: sum(items.values()))


def tiled(shape: Iterable[int], itemsize: int, platform: str) -> int:
    """Count the bytes of an array, with the padding of TPU's tiles.

    A tile is 8 x 128 elements of the two minor dims. XLA makes those dims minor that
    fill tiles best.
    """
    dims = list(shape)
    size = math.prod(dims) * itemsize
    if platform != "tpu" or len(dims) < 2:
        return size

    def padded(lanes: int, sublanes: int) -> float:
        up = min(_SUBLANES, 1 << (sublanes - 1).bit_length())
        wide = -(-lanes // _LANES) * _LANES / lanes
        return size * wide * (-(-sublanes // up) * up) / sublanes

    pairs = [(a, b) for i, a in enumerate(dims) for j, b in enumerate(dims) if i != j]
    return math.ceil(min(padded(*pair) for pair in pairs))


def saved_bytes(share: Share, platform: str) -> int:
    """Count what all layers keep of a microbatch."""
    how, model = share.how, share.model

    def size(array: Residual) -> int:
        shape, H = array.shape, model.head_size
        if len(shape) == 4 and shape[-1] == H:
            shape = (*shape[:-1], _lanes(share))
        return tiled(shape, array.dtype.itemsize, platform)

    arrays = kept(model, how, share.rows, share.length, share.documents)
    return model.num_layers * sum(map(size, arrays))


def _lanes(share: Share) -> int:
    """Give a head's dim as it lies in memory: minor where splash reads it."""
    H = share.model.head_size
    return -(-H // _LANES) * _LANES if share.how.attention is Attention.splash else H


def _model(share: Share, platform: str) -> dict[str, int]:
    width = share.how.compute_dtype.itemsize
    hidden = share.tokens * share.model.embed_dim * share.how.activation_dtype.itemsize
    items = {"saved activations": saved_bytes(share, platform), "features": 3 * hidden}
    if share.microbatches > 1:
        items["sum over microbatches"] = _held(share.weights, FLOAT32, platform)
    if share.documents and share.how.attention is Attention.cudnn:
        items["attention mask"] = share.rows * share.length**2 * width
    if platform == "tpu" and width < FLOAT32:
        matrices = [w for w in share.weights if w.in_layers and w.is_matrix]
        items["rounded weights"] = _held(matrices, width, platform)
    return items


def _loss(share: Share, platform: str) -> dict[str, int]:
    V, head = share.model.vocab_size or 0, share.head
    width = share.how.compute_dtype.itemsize
    logits = (share.rows, share.tile, V)
    return {
        "logits of a tile": tiled(logits, FLOAT32 + width, platform),
        "rounded head": tiled(head.used, width, platform),
        "head's gradient": tiled(head.used, FLOAT32, platform),
    }


def _layers(share: Share, platform: str) -> dict[str, int]:
    layers, width = share.model.num_layers, share.how.compute_dtype.itemsize
    weights = [w for w in share.weights if w.in_layers]
    gathered = sum(w.size for w in weights if w.gathered and w.is_matrix) // layers
    return {
        "gradients": _held(weights, FLOAT32, platform),
        "head's gradient": tiled(share.head.used, FLOAT32, platform),
        "gathered weights": (2 if platform == "tpu" else 1) * gathered * width,
        "gradients to scatter": gathered * FLOAT32,
        "one layer": _one_layer(share, platform),
    }


def _one_layer(share: Share, platform: str) -> int:
    """Count what the backward pass of one layer makes.

    XLA fuses what is done element by element, so that only what products and the
    kernel read and write exists. That is most in its MLP (the cotangents of all that is
    as wide) or in its attention. Recomputed values wait for their use: until the MLP's
    cotangents take their place there is one array more, and attention's stay longer.
    """
    model, how = share.model, share.how
    width, again = how.activation_dtype.itemsize, how.remat != Remat.none
    heads = 2 * model.num_heads + 2 * model.kv_heads
    shape = (share.rows, heads, share.length, _lanes(share))
    attention = tiled(shape, width, platform)
    if how.attention is Attention.xla:
        scores = share.rows * model.num_heads * share.length**2
        attention += scores * (FLOAT32 + width)
    wide = 2 + (model.activation is Activation.swiglu) + again
    mlp = wide * share.tokens * model.mlp_size * width
    hidden = share.tokens * model.embed_dim * width
    return max(mlp, attention) + again * attention + (5 if again else 2) * hidden


def _update(share: Share, platform: str, muon: bool) -> dict[str, int]:
    """Count gradients, and what Muon makes of the largest weight.

    Whole matrices of its part of the layers: the direction, float32 and rounded, a
    product of that size, and the small squares.
    """
    items = {"gradients": _held(share.weights, FLOAT32, platform)}
    if muon:
        width = share.how.compute_dtype.itemsize
        layers = share.model.num_layers // share.ways(share.spread)
        items["Muon's matrices"] = layers * max(
            (2 * FLOAT32 + width) * long * short + (FLOAT32 + width) * short**2
            for short, long in map(sides, filter(is_muons, share.weights))
        )
    return items


def _held(weights: Iterable[Weight], itemsize: int, platform: str) -> int:
    return sum(tiled(w.shard, itemsize, platform) for w in weights)
