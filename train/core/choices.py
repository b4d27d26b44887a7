"""The named choices of the core that a config sets."""

from enum import StrEnum


class MomentDtype(StrEnum):
    """The dtype in which moments are stored; bfloat16 and int8 round stochastically.

    `int8` stores codes of levels that are closer to each other near zero
    (train/core/optimizer/moments.py).
    """

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
