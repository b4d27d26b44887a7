"""The balance statistics that layers with experts return."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Routing(NamedTuple):
    """The balance statistics of one layer, without padding.

    load_E: float32, the number of tokens of each expert, over all devices.
    loss: float32, the sum of the balance losses over the local tokens.
    """

    load_E: Float[Array, "*L E"]
    loss: Float[Array, "*L"]
