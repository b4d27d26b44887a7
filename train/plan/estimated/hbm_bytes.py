"""Memory traffic of one device in a step, from shapes alone.

Counted as compiled/hbm_bytes.py counts it in a compiled program: what instructions read
and write, as if no cache held anything from one to the next.

- A product reads both operands and writes its result, three times a weight: for the
  result, for the cotangent of its input and for the weight's own gradient, in float32.
  An attention kernel reads queries, keys, values, and backward also the result and its
  cotangent; it keeps scores on the chip.
- Between them stands what is done element by element, each piece one pass: norms,
  rotation or bias, the activation. `remat=dots` repeats those passes and the kernel,
  `full` the products too, but for the last.
- What is kept is copied into a stack of all layers; XLA's GPU compiler also zeroes that
  first, and copies out of it what it reads.
- Where half of a core's memory holds a layer's largest value (TPU), values go from one
  instruction to the next inside it. Those that wait leave it once and come back once.
"""

import math
from dataclasses import dataclass

from model.config import Activation, Attention
from train.config import Remat
from train.plan.estimated.local_step import Share, Weight, is_muons, sides

_FLOAT32 = 4
_NEWTON_SCHULZ = 5  # steps


@dataclass(frozen=True)
class Moved:
    """Bytes: of products and kernels, and of all else."""

    products: float
    others: float

    def __add__(self, more: "Moved") -> "Moved":
        return Moved(self.products + more.products, self.others + more.others)

    def __rmul__(self, count: int) -> "Moved":
        return Moved(count * self.products, count * self.others)


def movements(
    share: Share,
    platform: str,
    muon: bool,
    state_bytes: int,
    kept_bytes: int,
    core_memory: int,
) -> Moved:
    """Count what a device reads and writes in a step.

    Args:
        share: of the program.
        platform: JAX's name of it.
        muon: whether matrices are orthogonalized.
        state_bytes: of the device's part of the state.
        kept_bytes: what all layers keep of a microbatch.
        core_memory: bytes of a core's own, that values may stay in; 0: none.
    """
    layer = _weights(share) + _kernel(share) + _values(share, core_memory)
    stacked = Moved(0, (4 if platform == "gpu" else 2) * kept_bytes)
    gradients = _FLOAT32 * sum(math.prod(w.shard) for w in share.weights)
    added = Moved(0, 3 * gradients * (share.microbatches > 1))
    each = (
        share.model.num_layers * layer + stacked + _loss(share, platform, core_memory)
    )
    # The state is read and written, gradients read by their norm and by the update.
    update = Moved(0, 2 * state_bytes + 2 * gradients)
    step = share.microbatches * (each + added) + update
    return step + _muon(share) if muon else step


def _uses(share: Share, weight: Weight) -> int:
    """Count the products of a weight: nothing needs the last result once more."""
    last = weight.name == "layers.mlp.down.weight"
    return 3 + (share.how.remat == Remat.full and not last)


def _in_layers(share: Share) -> list[Weight]:
    return [w for w in share.weights if w.in_layers and w.is_matrix]


def _weights(share: Share) -> Moved:
    """Count a layer's weights and their gradients.

    Rounding or gathering writes what each product reads, but for one, which writes the
    gradient that the reduction reads.
    """
    width, layers = share.how.compute_dtype.itemsize, share.model.num_layers
    moved = sum(
        ((_uses(share, weight) - 1) * width + _FLOAT32) * weight.size / layers
        for weight in _in_layers(share)
    )
    return Moved(moved, moved)


def _kernel(share: Share) -> Moved:
    """Count attention of a layer: a kernel, or plain products that write scores."""
    model, how = share.model, share.how
    width, again = how.activation_dtype.itemsize, how.remat != Remat.none
    N, K, T = model.num_heads, model.kv_heads, share.length
    heads = (2 * N + 2 * K) * (1 + again) + 4 * N + 4 * K
    moved = share.tokens * heads * model.head_size * width
    square = share.rows * T * T * width
    if how.attention is Attention.cudnn and share.documents:
        moved += square * (2 + again)  # its mask
    if how.attention is not Attention.xla:
        return Moved(moved, 0)
    # Each of six products writes or reads scores or their cotangent, rounded; softmax
    # reads and writes them, forward and backward.
    return Moved(moved + N * square * (6 + 2 * again), N * square * (5 + 2 * again))


def _values(share: Share, core_memory: int) -> Moved:
    """Count what products of a layer, and the passes between them, do with values."""
    model, remat = share.model, share.how.remat
    D, F, H = model.embed_dim, model.mlp_size, model.head_size
    N, K = model.num_heads, model.kv_heads
    gated = model.activation is Activation.swiglu
    each = share.tokens * share.how.activation_dtype.itemsize
    forwards = 1 + (remat != Remat.none)
    if each * max(F, D, N * H) < core_memory / 2:
        values = 4 * D + (2 * N + 2 * K) * H + (2 + gated) * F
        return Moved(0, 2 * each * values * (forwards + 1))
    dims = sum(_uses(share, w) * sum(_dims(w)) for w in _in_layers(share))
    heads = 2 * (N + 2 * K) * H
    forward = 6 * D + heads + (2 + gated) * F  # a norm reads twice and writes once
    backward = 12 * D + heads + (7 if gated else 3) * F
    return Moved(each * dims, each * (forwards * forward + backward))


def _dims(weight: Weight) -> tuple[int, int]:
    """Give the inputs and outputs of one layer's matrix that a device uses."""
    split = 1 + weight.info.inputs
    return math.prod(weight.used[1:split]), math.prod(weight.used[split:])


def _loss(share: Share, platform: str, core_memory: int) -> Moved:
    """Count the head: logits are float32, and each tile reads it and adds to its sum.

    Logits are written and read by their sums; two products read their cotangent. XLA's
    TPU compiler makes the maximum with the logits, and the cotangent where it is read.
    The GPU's reads logits for each of three sums, and writes the cotangent, rounded.
    """
    width, vocab = share.how.compute_dtype.itemsize, share.model.vocab_size or 0
    logits = share.tokens * vocab
    tiles = share.length // share.tile
    head = tiles * share.head.size * (2 * width + 2 * _FLOAT32)
    if share.rows * share.tile * vocab * _FLOAT32 < core_memory / 2:
        return Moved(head, 0)
    if platform == "gpu":
        sums = 3 * _FLOAT32 + _FLOAT32 + width
        return Moved(head + logits * (_FLOAT32 + 2 * width), logits * sums)
    return Moved(head + logits * 3 * _FLOAT32, logits * _FLOAT32)


def _muon(share: Share) -> Moved:
    """Count Newton-Schulz: of each matrix three products a step, and their sum.

    A matrix that stays cut is gathered for two of them, which writes it once more.
    """
    width, layers = share.how.compute_dtype.itemsize, share.model.num_layers
    matrices = list(filter(is_muons, share.weights))
    kept = tuple(axis for axis in matrices[0].held if axis not in share.spread)
    products = others = 0.0
    for short, long in map(sides, matrices):
        whole = short * long * layers / share.ways(share.spread)
        part = whole / share.ways(kept)
        products += 2 * width * whole + _FLOAT32 * part
        others += (3 * _FLOAT32 + width) * part + 2 * width * whole * bool(kept)
    return _NEWTON_SCHULZ * Moved(products, others)
