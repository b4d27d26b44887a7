"""The cache of the gated delta net.

Shapes: B batch, E earlier positions, K key heads, R value heads of a key head, H key
dim, V value dim, L layers.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class DeltaState(NamedTuple):
    """The state of a gated delta net after `length` positions.

    Row b begins at position first_B[b], or at 0 if first_B is None. `inputs` are the
    last E inputs of the convolutions of queries, keys and values. R value heads share a
    key head.
    """

    state: Float[Array, "*L B K R H V"]
    inputs: tuple[Float[Array, "*L B E heads dim"], ...]
    length: Int[Array, "*L"]
    first_B: Int[Array, "*L B"] | None = None
    has_positions = False
