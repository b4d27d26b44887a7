"""Advice names the bottleneck, and its overrides give a valid config."""

import dataclasses
import re

import pytest

from tests.train.machines import execution, machine, total
from train.plan.advice import print_prediction

PER_SECOND = {"products": 0.865 * 197e12, "memory": 0.85 * 819e9, "ici": 0.74 * 200e9}
DCN_PER_SECOND = 0.33 * 3.125e9
FSDP = "mesh=fsdp data.batch_size=256"
TENSOR = "mesh=fsdp_tensor mesh.tensor=16"
SLICES = "data.batch_size=512"


def step(products=1.0, memory=0.5, recomputed=1.0, **seconds):
    """Return a step that keeps each resource busy for a number of seconds.

    `seconds` has the mesh axis of each collective over ICI, or `dcn_` and the axis.
    """
    collectives = [
        total(axis.removeprefix("dcn_"), "DCN", DCN_PER_SECOND * time_s)
        if axis.startswith("dcn_")
        else total(axis, "ICI", PER_SECOND["ici"] * time_s)
        for axis, time_s in seconds.items()
    ]
    flops = PER_SECOND["products"] * products
    num_bytes = PER_SECOND["memory"] * memory
    return execution(flops, round(num_bytes), *collectives, needed=flops / recomputed)


CASES = [
    (
        f"v5e-256 {FSDP} train.remat=full",
        step(recomputed=1.33, fsdp=0.5),
        "bound by computing: .* 1.33 x what the model needs",
        "train.remat=[attention]",
    ),
    (f"v5e-256 {FSDP}", step(), "bound by computing", ""),
    (
        f"v5e-256 {TENSOR} data.batch_size=256",
        step(tensor=0.3),
        "bound by computing: .* most of it tensor over ICI",
        "search=true",
    ),
    (f"v5e-256 {FSDP}", step(memory=3.0), "main memory", "data.batch_size=512"),
    (
        "v5e-8 mesh=fsdp data.batch_size=16 train.accumulation_steps=2",
        step(memory=3.0),
        "bound by main memory",
        "search=true",
    ),
    (
        f"v5e-256 {FSDP}",
        step(fsdp=3.0),
        "bound by the network: fsdp over ICI at 148.0 GB/s",
        "data.batch_size=512",
    ),
    (
        f"v5e-128x4 {SLICES} mesh=fsdp mesh.dcn.fsdp=2 mesh.data=2 mesh.dcn.data=2",
        step(dcn_fsdp=3.0),
        "fsdp over DCN",
        "search=true",
    ),
]


@pytest.mark.parametrize(("layout", "cost", "bottleneck", "override"), CASES)
def test_the_bottleneck_is_named_and_the_remedy_is_an_override(
    composed, layout, cost, bottleneck, override, capsys
):
    name, *overrides = layout.split()
    cluster = machine(composed, name, overrides)
    prediction = cluster.predict(cost)
    advice = cluster.advise(prediction)
    assert advice.override == override
    assert re.search(bottleneck, advice.bottleneck), advice.bottleneck
    print_prediction(prediction, advice)
    assert f"{advice.change}: {advice.override}".strip(": ") in capsys.readouterr().out
    if override and override != "search=true":
        changed_cluster = machine(composed, name, [*overrides, *override.split()])
        assert changed_cluster.config != cluster.config


def test_idle_matrix_units_are_named(composed):
    cluster = machine(composed, "v6e-8", ["mesh=fsdp", "data.batch_size=8"])
    prediction = dataclasses.replace(cluster.predict(step()), fill=0.25)
    assert "25% of matrix units" in cluster.advise(prediction).bottleneck


def test_the_bound_of_each_section_is_printed(composed, capsys):
    """Products bound the step as a whole, but memory bounds the loss."""
    cluster = machine(composed, "v5e-256", FSDP.split())
    layers = step(products=3.0)
    loss = step(products=0.5, memory=1.0)
    (first,) = layers.sections
    (second,) = loss.sections
    sections = (first, dataclasses.replace(second, name="loss"))
    prediction = cluster.predict(dataclasses.replace(layers, sections=sections))
    advice = cluster.advise(prediction)
    assert advice.bottleneck.startswith("bound by computing")
    print_prediction(prediction, advice)
    assert "step: matrix products, loss: main memory" in capsys.readouterr().out
