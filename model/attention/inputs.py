"""The operands and results of attention kernels.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Inputs(NamedTuple):
    """The operands of attention. The queries are the last T of S positions.

    segment_ids_BS: int32 document of each position. None means one document in a row.
    sinks_N: the score of one additional key for each head. The value vector of this
        key is zero, so that the key only takes weight from the others.
    """

    q_BTNH: Float[Array, "B T N H"]
    k_BSKH: Float[Array, "B S K H"]
    v_BSKV: Float[Array, "B S K V"]
    segment_ids_BS: Int[Array, "B S"] | None = None
    sinks_N: Float[Array, "N"] | None = None


class Chunks(NamedTuple):
    """The operands of one step of a ring (model/parts/context/ring.py).

    Heads come before positions. Queries are already scaled by 1/sqrt(H). `documents`
    has the segment ids of queries and of keys.
    """

    q_BNTH: Float[Array, "B N T H"]
    k_BKSH: Float[Array, "B K S H"]
    v_BKSV: Float[Array, "B K S V"]
    documents: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None

    @property
    def same_document_BTS(self) -> Bool[Array, "B T S"] | None:
        """True where query and key share a document; None if a row is one document."""
        if self.documents is None:
            return None
        queries_BT, keys_BS = self.documents
        return queries_BT[:, :, None] == keys_BS[:, None]


class Result(NamedTuple):
    """The output over the keys seen so far, and the log-sum-exp of their scores."""

    o_BNTV: Float[Array, "B N T V"]
    lse_BNT: Float[Array, "B N T"]


class Attended(NamedTuple):
    """The output of attention, and a bound on the scores of each head.

    bound_N: the float32 maximum, over queries, of the log-sum-exp of a query's scores.
        No score is larger. The largest score is smaller by at most the logarithm of the
        number of keys. A bound has no gradient, and with sinks it may be larger.
    """

    o_BTNV: Float[Array, "B T N V"]
    bound_N: Float[Array, "N"]


def sinks_gradient(
    sinks_N: Float[Array, "N"], result: Result, do_BNTV: Float[Array, "B N T V"]
) -> Float[Array, "N"]:
    """Return the gradient of sinks from a result whose log-sum-exps include them."""
    o_BNTV, do_BNTV = (x.astype(jnp.float32) for x in (result.o_BNTV, do_BNTV))
    weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[:, None] - result.lse_BNT)
    lost_BNT = weight_BNT * jnp.sum(do_BNTV * o_BNTV, axis=-1)
    return -jnp.sum(lost_BNT, axis=(0, 2)).astype(sinks_N.dtype)


def score_bound(lse_BNT: Float[Array, "B N T"]) -> Float[Array, "N"]:
    """Return the bound of `Attended` from the log-sum-exps of all queries."""
    return jnp.max(jax.lax.stop_gradient(lse_BNT), axis=(0, 2))
