"""Each bottleneck is named, with keys that exist and a config that is laid out."""

import dataclasses
import re

import pytest

from tests.train.machines import execution, in_one_section, machine, total
from train.mesh_sizes import mesh_mistakes
from train.plan.advice import advise, print_prediction
from train.plan.cost import Flops
from train.plan.recomputing import POLICIES, format_policy
from train.plan.roofline import predict

SECOND = {"products": 0.865 * 197e12, "memory": 0.85 * 819e9, "ici": 0.74 * 200e9}
SLICES = ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2", "data.batch_size=512")
ACROSS = ("mesh=fsdp", "mesh.dcn.fsdp=2", "data.batch_size=512")


def step(**seconds):
    """A step that keeps resources busy for so long."""
    sent = []
    if "ici" in seconds:
        sent.append(total("fsdp", "ICI", SECOND["ici"] * seconds["ici"]))
    if "tensor" in seconds:
        sent.append(total("tensor", "ICI", SECOND["ici"] * seconds["tensor"]))
    if "dcn" in seconds:
        sent.append(total(seconds["along"], "DCN", 0.33 * 3.125e9 * seconds["dcn"]))
    flops = SECOND["products"] * seconds.get("products", 1.0)
    memory = round(SECOND["memory"] * seconds.get("memory", 0.5))
    found = execution(flops, memory, *sent, needed=flops / seconds.get("again", 1.0))
    return found


BATCH = "data.batch_size=256"
CASES = [
    (
        "v5e-256",
        ("mesh=fsdp", BATCH, "train.remat=full"),
        step(again=1.33),
        "bound by computing: .* 1.33 x what the model needs",
        "train.remat=[attention]",
    ),
    (
        "v5e-256",
        ("mesh=fsdp", BATCH, "train.remat=dots"),
        step(again=1.2, ici=0.5),
        "no product overlaps .* fsdp over ICI",
        f"train.remat={format_policy(POLICIES[-2])}",
    ),
    ("v5e-256", ("mesh=fsdp", BATCH), step(), "bound by computing", ""),
    (
        "v5e-256",
        ("mesh=fsdp_tensor", "mesh.tensor=16", BATCH),
        step(tensor=0.3),
        "bound by computing: .* most of it tensor over ICI",
        "mesh.tensor=8 mesh.fsdp=32",
    ),
    (
        "v5e-256",
        ("mesh=fsdp", BATCH),
        step(memory=3.0),
        "bound by main memory",
        "data.batch_size=512",
    ),
    (
        "v5e-256",
        ("mesh=fsdp", "data.batch_size=1024", "train.accumulation_steps=4"),
        step(memory=3.0),
        "bound by main memory",
        "train.accumulation_steps=2",
    ),
    (
        "v5e-256",
        ("mesh=fsdp", BATCH),
        step(ici=3.0),
        "bound by the network: fsdp over ICI at 148.0 GB/s",
        "data.batch_size=512",
    ),
    (
        "v5e-256",
        ("mesh=fsdp", "data.batch_size=512", "train.accumulation_steps=2"),
        step(ici=3.0),
        "fsdp over ICI",
        "train.accumulation_steps=1",
    ),
    (
        "v5e-256",
        ("mesh=fsdp_tensor", "mesh.tensor=16", BATCH),
        step(tensor=3.0),
        "tensor over ICI",
        "mesh.tensor=8 mesh.fsdp=32",
    ),
    (
        "v5e-256x2",
        SLICES,
        step(dcn=3.0, along="data"),
        "data over DCN at 1.0 GB/s",
        "data.batch_size=1024",
    ),
    (
        "v5e-256x2",
        ACROSS,
        step(dcn=3.0, along="fsdp"),
        "fsdp over DCN",
        "mesh.fsdp=256 mesh.data=2 mesh.dcn.fsdp=1 mesh.dcn.data=2",
    ),
    (  # copies there are already stay
        "v5e-128x4",
        (*ACROSS, "mesh.data=2", "mesh.dcn.data=2"),
        step(dcn=3.0, along="fsdp"),
        "fsdp over DCN",
        "mesh.fsdp=128 mesh.data=4 mesh.dcn.fsdp=1 mesh.dcn.data=4",
    ),
    (
        "v5e-256x2",
        ("mesh=ddp", "mesh.tensor=4", "mesh.dcn.tensor=2", "data.batch_size=512"),
        step(dcn=3.0, along="tensor"),
        "tensor over DCN",
        "mesh.tensor=2 mesh.data=256 mesh.dcn.tensor=1 mesh.dcn.data=2",
    ),
    (  # what is left is on data
        "v5e-256",
        ("mesh=ddp", "mesh.tensor=8", BATCH),
        step(tensor=3.0),
        "tensor over ICI",
        "mesh.tensor=4 mesh.fsdp=2",
    ),
    (  # too few rows for more devices
        "v5e-256",
        ("mesh=fsdp_tensor", "mesh.tensor=16", "data.batch_size=16"),
        step(tensor=3.0),
        "tensor over ICI",
        "mesh.tensor=8 mesh.fsdp=32 data.batch_size=32",
    ),
    (  # nine rows a device are three times three, not four times any
        "v5e-8",
        ("mesh=fsdp", "data.batch_size=72", "train.accumulation_steps=9"),
        step(memory=3.0),
        "bound by main memory",
        "train.accumulation_steps=3",
    ),
]


@pytest.mark.parametrize(("name", "overrides", "does", "bound", "override"), CASES)
def test_the_bottleneck_is_named_and_the_remedy_can_be_typed(
    composed, name, overrides, does, bound, override, capsys
):
    at = machine(composed, name, *overrides)
    found = at.predict(does)
    said = advise(found, at.config, at.mesh)
    assert said.override == override
    print_prediction(found, said)
    printed = capsys.readouterr().out
    assert said.change in printed
    assert "MFU" in printed
    assert re.search(bound, said.bottleneck), said.bottleneck
    if override:
        changed = machine(composed, name, *overrides, *override.split())
        assert changed.config != at.config
        assert mesh_mistakes(changed.config, changed.mesh.size) == []


def test_the_room_that_is_left_is_named(composed):
    at = machine(composed, "v5e-256", "mesh=fsdp", BATCH, "train.remat=full")
    found = at.predict(step(again=1.33))
    said = advise(found, at.config, at.mesh, spare_bytes=3 * 2**30)
    assert "3.00 GiB" in said.change


def test_idle_matrix_units_are_named(composed):
    at = machine(composed, "v6e-8", "mesh=fsdp", "model=llama3_1b", "data.batch_size=8")
    done = execution(1e14, 0)
    done = in_one_section(done, Flops(0.0, attention=1e14))
    model = dataclasses.replace(at.config.model, head_dim=64)
    config = dataclasses.replace(at.config, model=model)
    found = predict(done, config, at.mesh, at.chip)
    assert "25% of matrix units" in advise(found, at.config, at.mesh).bottleneck


def test_sections_that_main_memory_bounds_are_named(composed, capsys):
    """Products bound the step as a whole; the loss has one second of memory."""
    at = machine(composed, "v5e-256", "mesh=fsdp", BATCH)
    layers, loss = step(products=3.0), step(products=0.5, memory=1.0)
    (first,), (second,) = layers.sections, loss.sections
    sections = (first, dataclasses.replace(second, name="loss"))
    found = at.predict(dataclasses.replace(layers, sections=sections))
    advice = advise(found, at.config, at.mesh)
    assert advice.bottleneck.startswith("bound by computing")
    print_prediction(found, advice)
    printed = " ".join(capsys.readouterr().out.split())
    assert "main memory bounds the loss with 1.0 s (22%) of the step" in printed
    print_prediction(at.predict(step()), advice)
    assert "memory bounds" not in capsys.readouterr().out
