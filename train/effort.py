"""FLOPs and memory traffic of one device in a step, from shapes alone.

FLOPs are counted as train/work.py counts them in a compiled program. Bytes are those of
the operands and results of products and kernels, of what layers keep, and of the state;
what is done element by element is taken to be fused into them.
"""

from model.config import Attention
from train.config import Remat
from train.share import Share, is_muons, sides
from train.work import CUDNN, SPLASH, Work

_NEWTON_SCHULZ = 5  # steps
_BLOCKS = (512, 384, 256, 128)  # of splash (model/attention.py)


def effort(share: Share, muon: bool, state_bytes: int, kept_bytes: int) -> Work:
    """Count what a device does.

    Args:
        share: of the program.
        muon: whether matrices are orthogonalized.
        state_bytes: of the device's part of the state.
        kept_bytes: what all layers keep of a microbatch.
    """
    kernel, part = _attention(share)
    products = _products(share) + (_muon(share) if muon else 0.0)
    if share.how.attention is Attention.xla:
        products, kernel = products + kernel, 0.0
    moved = _moved(share, state_bytes, kept_bytes)
    return Work(products, kernel * part, kernel, moved, ())


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
        forward, total = SPLASH["splash_mha_fwd"], sum(SPLASH.values())
        blocks = T // next(size for size in _BLOCKS if T % size == 0)
        part = (blocks + 1) / (2 * blocks)
    elif share.how.attention is Attention.cudnn:
        forward, total, part = CUDNN[False], sum(CUDNN.values()), 0.5
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


def _moved(share: Share, state_bytes: int, kept_bytes: int) -> int:
    model, width = share.model, share.how.activation_dtype.itemsize
    matrices = [w for w in share.weights if w.is_matrix]
    used = sum(w.size for w in matrices if w.in_layers)
    # A weight is read and written rounded, and read by three products, or four; its
    # gradient is written, and read by the optimizer.
    again = share.how.remat == Remat.full
    weights = used * ((5 + again) * share.how.compute_dtype.itemsize + 2 * 4)
    # Each value of a layer, and its cotangent, is written once and read twice: those of
    # heads and MLP, and six of features (norms, products and sums).
    heads = 2 * (model.num_heads + model.kv_heads) * model.head_size
    mlp = (2 + (model.activation == "swiglu")) * model.mlp_size
    values = share.tokens * (heads + mlp + 6 * model.embed_dim) * width
    layers = model.num_layers * 3 * values * (3 if share.how.remat != Remat.none else 2)
    # Logits, float32, are written and read by their maximum, their sum and their
    # cotangent, which two products read. Each tile reads the head twice and adds to its
    # gradient.
    tiles = share.length // share.tile
    logits = share.tokens * (model.vocab_size or 0) * (4 * 4 + 3 * width)
    head = tiles * share.head.size * (2 * width + 2 * 4)
    each = weights + layers + logits + head + 3 * kept_bytes
    return int(share.microbatches * each + 2 * state_bytes)
