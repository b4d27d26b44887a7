"""Collect the data of the plan's page, an HTML file that works without a network.

The template `plan.html` in this folder draws the page from `plan.json`: the plan's
figures, the timelines of one layer, and how arrays are sharded.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.program import shown_command
from train.cli.schema import config_yaml
from train.hardware.chips import chip_of
from train.plan.advice import plan_sentences
from train.plan.array_layout import layout_data
from train.plan.compiled.trip_counts import read_module
from train.plan.layer_schedule import layer_timelines
from train.plan.plan import Plan
from train.plan.rates import rates_of

TEMPLATE = Path(__file__).with_name("plan.html")


def page_data(plan: Plan, command: Sequence[str]) -> dict[str, Any]:
    """Return what the page shows in addition to the plan's figures, as plain values.

    `command` are the command-line arguments that reproduce this plan.
    """
    config = plan.program.config
    advice = plan.advice
    prediction = plan.prediction if plan.fits else None
    return {
        "rows": config.data.batch_size,
        "sequence_length": config.data.sequence_length,
        "summary": plan_sentences(prediction, advice) if advice else [],
        "command": shown_command("train.plan", command),
        "config": config_yaml(config),
        "layers": layers_data(plan),
        "layout": layout_data(plan.program),
    }


def layers_data(plan: Plan) -> dict[str, Any]:
    """Return the timelines of a layer, with the rates of products and of main memory.

    If there are none, `missing` is the reason why.
    """
    mesh = plan.program.mesh
    model = plan.program.config.model
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if plan.text is None:
        return {"missing": "There is no compiled step whose schedule could be shown."}
    if chip is None:
        return {"missing": "Not drawn: the rates of this machine are not known."}
    module = read_module(plan.text, model)
    try:
        rates = rates_of(mesh, chip, model.compute_dtype)
        timelines = layer_timelines(module, mesh, rates, plan.cost.sections)
    except ValueError as error:
        return {"missing": f"Not drawn: {error}."}
    return {
        "missing": "" if timelines else "The compiled step has no loop over layers.",
        "flops": rates.flops,
        "memory": rates.memory,
        "passes": [asdict(timeline) for timeline in timelines],
    }
