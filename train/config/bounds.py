"""Bounds of numbers that several sections share."""

from math import inf
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from data.config import Count, Number

Positive = Annotated[float, Gt(0), Lt(inf)]
NotNegative = Annotated[float, Ge(0), Lt(inf)]
Seconds = Annotated[float, Gt(0)]
Step = Number | Literal["best"]  # best: the checkpoint with the lowest validation loss
AxisSize = Count | Literal[-1]  # -1: all remaining devices
Batches = Count | Literal[-1]  # -1: the whole validation split
