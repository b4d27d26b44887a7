"""A model on v5e-16, its programs estimated once; two slices."""

import dataclasses

import pytest

from train.hardware import devices as topology
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan import recomputing
from train.plan.budget import memory_budget
from train.plan.plan import Plan, estimate
from train.plan.recomputing import POLICIES
from train.plan.search import weigh
from train.plan.search.candidates import Layout

MODEL = (
    *("model=gpt2_124m", "model.vocab_size=50304", "mesh=ddp"),
    *("data.batch_size=64", "data.sequence_length=1024"),
)


@pytest.fixture
def devices(monkeypatch, tmp_path):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return fake_devices(parse_target("v5e-16"))


PLANS: dict[tuple, Plan] = {}
FEW = POLICIES[0], POLICIES[2], POLICIES[-1]


@pytest.fixture
def estimated_once(monkeypatch):
    """Estimate each program once, of three policies; none depends on the room."""
    monkeypatch.setattr(recomputing, "POLICIES", FEW)

    def once(program, budget=None):
        mesh = program.mesh
        key = repr(program.config), program.execution, mesh.devices.flat[0].device_kind
        if (key, mesh.size) not in PLANS:
            PLANS[key, mesh.size] = estimate(program)
        plan = PLANS[key, mesh.size]
        return dataclasses.replace(plan, budget=budget or plan.budget)

    monkeypatch.setattr(weigh, "estimate", once)


@pytest.fixture
def room():
    return memory_budget(parse_target("v5e-16").chip, 0.05)


@pytest.fixture
def config(composed):
    return composed(*MODEL)


STAGES = Layout(1, 4, 1, 1, 1, "none", 1, pipeline=2, dcn_pipeline=2)
COPIES = Layout(2, 4, 1, 2, 1, "none", 1)


@pytest.fixture
def two_slices(devices, monkeypatch):
    """Two slices, on which copies and stages are weighed; one way to recompute."""
    monkeypatch.setattr(recomputing, "POLICIES", POLICIES[:1])
    monkeypatch.setattr(weigh, "layouts", lambda *_: [STAGES, COPIES])
    return fake_devices(parse_target("v5e-4x2"))
