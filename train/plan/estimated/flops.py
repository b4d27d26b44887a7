"""FLOPs of one device in a step, from shapes alone, as compiled/flops.py counts them.

With its memory traffic (hbm_bytes.py) they are what a step takes.
"""

from model.config import Attention
from train.config import Remat
from train.plan.cost import CUDNN_PRODUCTS, SPLASH_PRODUCTS, Flops
from train.plan.estimated.local_step import Share, is_muons, sides

_NEWTON_SCHULZ = 5  # steps
_BLOCKS = (512, 384, 256, 128)  # of splash (model/attention.py)


def effort(share: Share, muon: bool) -> Flops:
    """Count what a device computes; with Muon, its products too."""
    kernel, part = _attention(share)
    products = _products(share) + (_muon(share) if muon else 0.0)
    if share.how.attention is Attention.xla:
        products, kernel = products + kernel, 0.0
    return Flops(products, kernel * part, kernel)


def _products(share: Share) -> float:
    """Forward one, backward two; with `full` the layers again."""
    sizes = {w.name: w.size for w in share.weights if w.is_matrix and w.in_layers}
    tokens = share.tokens * share.microbatches
    multiplied = 3 * sum(sizes.values())
    if share.how.remat == Remat.full:  # nothing needs the result of the last product
        multiplied += sum(sizes.values()) - sizes["layers.mlp.down.weight"]
    multiplied += 3 * share.head.size
    return 2.0 * multiplied * tokens


def _attention(share: Share) -> tuple[float, float]:
    """Count the FLOPs of attention, and the share that causality leaves."""
    model, T = share.model, share.length
    again = share.how.remat != Remat.none
    if share.how.attention is Attention.splash:
        forward, total = (
            SPLASH_PRODUCTS["splash_mha_fwd"],
            sum(SPLASH_PRODUCTS.values()),
        )
        blocks = T // next(size for size in _BLOCKS if T % size == 0)
        part = (blocks + 1) / (2 * blocks)
    elif share.how.attention is Attention.cudnn:
        forward, total, part = CUDNN_PRODUCTS[False], sum(CUDNN_PRODUCTS.values()), 0.5
    else:
        forward, total, part = 2, 6, 1.0
    one = 2.0 * share.tokens * T * model.num_heads * model.head_size
    times = model.num_layers * share.microbatches
    return (total + forward * again) * one * times, part


def _muon(share: Share) -> float:
    """Count Newton-Schulz: x x', its square, and their sum times x, five times.

    Devices that do not divide the layers divide the products.
    """
    each = sum(
        4.0 * short**2 * long + 2.0 * short**3
        for short, long in map(sides, filter(is_muons, share.weights))
    )
    matrices = next(filter(is_muons, share.weights))
    cut = set(share.spread) | set(matrices.held)
    return _NEWTON_SCHULZ * each * share.model.num_layers / share.ways(tuple(cut))
