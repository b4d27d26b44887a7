"""Keys of `python -m train.plan`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Lt
from typing_extensions import Doc

from train.config import Config, Number

MARGIN = 0.05  # fraction of a device's memory that stays free by default


@dataclass(frozen=True)
class PlanConfig(Config):
    """Keys of `python -m train.plan`, in addition to those of training."""

    target: Annotated[
        str | None, Doc("The machine to compile for. null estimates for this machine.")
    ] = None
    margin: Annotated[
        float, Ge(0), Lt(1), Doc("The fraction of device memory that must stay free.")
    ] = MARGIN
    json: Annotated[bool, Doc("Print one JSON object, for programs.")] = False
    output: Annotated[
        str | None, Doc("The folder of plan.html and plan.json. null: plans/<name>.")
    ] = None
    compile: Annotated[
        bool, Doc("Compile the step for the target. false stops after the estimate.")
    ] = True
    show: Annotated[
        bool, Doc("Write the step as traced, lowered and optimized, with a summary.")
    ] = False
    search: Annotated[bool, Doc("Search for the fastest layout that fits.")] = False
    search_precision: Annotated[
        bool, Doc("Also weigh small moments, host memory and eight-bit products.")
    ] = False
    search_compiles: Annotated[
        Number, Doc("The least number of candidates that a search compiles.")
    ] = 3
    search_minutes: Annotated[
        float, Gt(0), Doc("The search compiles no more candidates after these minutes.")
    ] = 15.0
