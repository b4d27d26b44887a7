"""A model is searched on four meshes of v5e-8; each program is estimated once."""

import dataclasses

import pytest

from train.hardware import devices as topology
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan import recomputing
from train.plan.budget import MemoryBudget
from train.plan.plan import Plan, estimate
from train.plan.recomputing import POLICIES
from train.plan.search import weigh
from train.plan.search.candidates import Layout

MODEL = (
    *("model=gpt2_124m", "model.vocab_size=50304", "mesh=ddp"),
    *("data.batch_size=8", "data.sequence_length=1024"),
)
MESHES = [Layout(1, 8), Layout(2, 4), Layout(1, 4, 2), Layout(1, 1, 8)]
FEW = POLICIES[0], POLICIES[3], POLICIES[-1]
LARGE = 2**34
PLANS: dict[tuple, Plan] = {}


@pytest.fixture(autouse=True)
def estimated_once(monkeypatch):
    """Estimate each program of three policies once, and use it for any budget."""
    monkeypatch.setattr(recomputing, "POLICIES", FEW)
    monkeypatch.setattr(weigh, "layouts", lambda *_: MESHES)

    def estimate_once(program, budget):
        key = repr(program.config), program.execution, program.mesh.size
        if key not in PLANS:
            PLANS[key] = estimate(program)
        return dataclasses.replace(PLANS[key], budget=budget)

    monkeypatch.setattr(weigh, "estimate", estimate_once)


@pytest.fixture
def devices(monkeypatch, tmp_path):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return fake_devices(parse_target("v5e-8"))


def budget(size: int) -> MemoryBudget:
    return MemoryBudget(size, size, size)


@pytest.fixture
def config(composed):
    return composed(MODEL)
