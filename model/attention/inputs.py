"""The operands and results of attention kernels.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim.
"""

from typing import NamedTuple

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
    """The operands of one step of a ring (model/attention/ring.py).

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
