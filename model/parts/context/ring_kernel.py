"""One step of a ring (model/parts/context/ring.py): attention to received keys.

Keys and values travel between devices, or smaller arrays that each device expands to
the keys and values of its heads (model/parts/latent/ring.py). The backward pass
expands them again.

Shapes: B batch, T local time, K key/value heads, H head dim, V value dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array

from model.attention.inputs import Chunks, Result


class Travelling(NamedTuple):
    """The arrays that travel from device to device.

    arrays: keys [B, K, T, H] and values [B, K, T, V], or the arrays that `expand`
        takes. Their third dim is T too.
    segment_ids_BT: the documents of the keys.
    """

    arrays: Sequence[Array]
    segment_ids_BT: Array | None


class Pair(NamedTuple):
    """A chunk of queries, a chunk of the arrays that travel, and their documents."""

    q_BNTH: Array
    arrays: Sequence[Array]
    documents: tuple[Array, Array] | None


class Kernel(NamedTuple):
    """The forward and backward passes of a kernel, with explicit log-sum-exps.

    Arguments are `Chunks`. Heads come before positions, as in the kernels' own layout,
    so that no step has to transpose. A query whose keys are all masked gets a
    log-sum-exp so low that its result has no weight.

    forward: (chunks, causal) -> the result, with a float32 log-sum-exp.
    backward: (chunks, causal, result, cotangent) -> the gradients of q, k and v that
        these chunks contribute. The result is merged over all keys.
    expand: (weight, arrays) -> keys and values. None if keys and values travel.
    """

    forward: Callable[..., Result]
    backward: Callable[..., Sequence[Array]]
    expand: Callable[..., Sequence[Array]] | None = None

    def attend(self, weight: Array | None, pair: Pair, causal: bool) -> Result:
        """Return the result of the queries over the keys."""
        q, arrays, documents = pair
        k, v = self.expand(weight, arrays) if self.expand else arrays
        return self.forward(Chunks(q, k, v, documents), causal)

    def differentiate(
        self, weight: Array | None, pair: Pair, causal: bool, result: Result, do: Array
    ) -> tuple[Array, Array | None, Sequence[Array]]:
        """Return the gradients of the queries, the weight and the arrays."""
        q, arrays, documents = pair
        if self.expand is None:
            k, v = arrays
            chunks = Chunks(q, k, v, documents)
            dq, *array_grads = self.backward(chunks, causal, result, do)
            return dq, None, array_grads
        (k, v), transpose = jax.vjp(self.expand, weight, arrays)
        chunks = Chunks(q, k, v, documents)
        dq, dk, dv = self.backward(chunks, causal, result, do)
        dweight, array_grads = transpose((dk.astype(k.dtype), dv.astype(v.dtype)))
        return dq, dweight, array_grads
