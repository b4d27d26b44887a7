"""Keys of `python -m train.plan`."""

from dataclasses import dataclass

from train.config import Config

MARGIN = 0.05  # part of a device's memory that stays free, unless told otherwise


@dataclass(frozen=True)
class PlanConfig(Config):
    """Those of training, and its own."""

    target: str | None = None  # a machine to compile for (train/hardware/targets.py)
    margin: float = MARGIN  # part of its memory that must stay free
    json: bool = False  # print one JSON object, for programs
    output: str | None = None  # folder of plan.html, plan.json; null: plans/<name>
    search: bool = False  # for the fastest layout that fits
    search_compiles: int = 4  # how many of the best to compile, at least; 0: none
    search_minutes: float = 15.0  # after which no more are compiled
