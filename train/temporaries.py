"""Memory that a step needs besides its arguments, itemised, without a compiler.

Three moments are weighed; the one that needs most gives the items.

- `loss`: a tile's logits in float32 and their cotangent, the gathered head, its
  gradient before it is scattered.
- `layers`: the gradients of the layers, and the backward pass of one of them: the
  weights that it gathers (and the next one's, which travel meanwhile), their gradients
  before they are scattered, what recomputing it makes (as much as it would have kept)
  and two cotangents.
- `update`: the gradients of everything, and Muon's matrices.

At each of them lives what the layers kept (train/residuals.py), the features, and the
sum over microbatches. TPU's tiles pad arrays (`tiled`); there the weights of all
layers are also rounded once, before the loop over them.
"""

import math
from collections.abc import Iterable

from model.config import Activation, Attention
from train.config import Remat
from train.residuals import Residual, kept
from train.share import Share, Weight

_LANES, _SUBLANES = 128, 8
FLOAT32 = 4


def temporaries(share: Share, platform: str, muon: bool) -> dict[str, int]:
    """Give bytes by what holds them at the step's peak."""
    always = _always(share, platform)
    moments = [
        _loss(share, platform),
        _layers(share, platform),
        _update(share, platform, muon),
    ]
    return always | max(moments, key=lambda items: sum(items.values()))


def tiled(shape: Iterable[int], itemsize: int, platform: str, fixed: bool) -> int:
    """Count the bytes of an array, with the padding of TPU's tiles.

    A tile is 8 x 128 elements of the two minor dims. XLA makes those dims minor that
    fill tiles best, unless a kernel wants the array as it is (`fixed`).
    """
    dims = list(shape)
    size = math.prod(dims) * itemsize
    if platform != "tpu" or len(dims) < 2:
        return size

    def padded(lanes: int, sublanes: int) -> float:
        up = min(_SUBLANES, 1 << (sublanes - 1).bit_length())
        wide = -(-lanes // _LANES) * _LANES / lanes
        return size * wide * (-(-sublanes // up) * up) / sublanes

    if fixed:
        return math.ceil(padded(dims[-1], dims[-2]))
    pairs = [
        (a, b) for i, a in enumerate(dims) for j, b in enumerate(dims) if i != j
    ]
    return math.ceil(min(padded(*pair) for pair in pairs))


def saved_bytes(share: Share, platform: str) -> int:
    """Count what all layers keep of a microbatch."""
    how, model = share.how, share.model
    splash = how.attention is Attention.splash

    def size(array: Residual) -> int:
        heads_first = array.shape[-2:] == (share.length, model.head_size)
        fixed = splash and heads_first
        return tiled(array.shape, array.dtype.itemsize, platform, fixed)

    arrays = kept(model, how, share.rows, share.length, share.documents)
    return model.num_layers * sum(map(size, arrays))


def _always(share: Share, platform: str) -> dict[str, int]:
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
        "logits of a tile": tiled(logits, FLOAT32 + width, platform, False),
        "rounded head": tiled(head.used, width, platform, False),
        "head's gradient": tiled(head.used, FLOAT32, platform, False),
    }


def _layers(share: Share, platform: str) -> dict[str, int]:
    layers, width = share.model.num_layers, share.how.compute_dtype.itemsize
    weights = [w for w in share.weights if w.in_layers and w.is_matrix]
    gathered = sum(w.size for w in weights if w.gathered) // layers
    return {
        "gradients": _held(share.weights, FLOAT32, platform),
        "gathered weights": 2 * gathered * width,
        "gradients to scatter": gathered * FLOAT32,
        "one layer": _one_layer(share, platform),
    }


def _one_layer(share: Share, platform: str) -> int:
    """Count what the backward pass of one layer makes.

    XLA fuses what is done element by element, so that only what products and the
    kernel read and write exists: with recomputation of the whole layer, and the
    cotangents of its attention or its MLP.
    """
    model, how = share.model, share.how
    H, width = model.head_size, how.activation_dtype.itemsize
    heads = 2 * model.num_heads + 2 * model.kv_heads
    splash = how.attention is Attention.splash
    shape = (share.rows, heads, share.length, H)
    attention = tiled(shape, width, platform, splash)
    gated = model.activation is Activation.swiglu
    mlp = (2 + gated) * share.tokens * model.mlp_size * width
    hidden = share.tokens * model.embed_dim * width
    if how.attention is Attention.xla:
        scores = share.rows * model.num_heads * share.length**2
        attention += scores * (FLOAT32 + width)
    made = max(mlp, attention) + 2 * hidden
    if how.remat != Remat.none:
        made += mlp + attention + 3 * hidden
    return made


def _update(share: Share, platform: str, muon: bool) -> dict[str, int]:
    items = {"gradients": _held(share.weights, FLOAT32, platform)}
    if muon:
        items["Muon's matrices"] = 0
    return items


def _held(weights: Iterable[Weight], itemsize: int, platform: str) -> int:
    return sum(tiled(w.shard, itemsize, platform, False) for w in weights)
