"""Keys of `python -m train.plan`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from train.config import Config, Number

MARGIN = 0.05  # part of a device's memory that stays free, unless told otherwise


@dataclass(frozen=True)
class PlanConfig(Config):
    """Those of training, and its own."""

    target: str | None = None  # a machine to compile for (train/hardware/targets.py)
    # Part of its memory that must stay free.
    margin: Annotated[float, Ge(0), Lt(1)] = MARGIN
    json: bool = False  # print one JSON object, for programs
    output: str | None = None  # folder of plan.html, plan.json; null: plans/<name>
    # Write the step as traced, lowered and optimized; say what XLA made of it.
    show: bool = False
    search: bool = False  # for the fastest layout that fits
    # Weigh small moments, host memory and products of eight bits too.
    search_precision: bool = False
    search_compiles: Number = 4  # how many of the best to compile, at least; 0: none
    # After which no more are compiled.
    search_minutes: Annotated[float, Gt(0)] = 15.0
