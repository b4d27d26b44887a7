"""A model on v5e-16 and on two slices, whose programs are estimated once."""

import dataclasses

import jax
import pytest

from train.hardware import devices as topology
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.plan import recomputing
from train.plan.budget import MemoryBudget, memory_budget
from train.plan.plan import Plan, estimate
from train.plan.recomputing import POLICIES
from train.plan.search import weigh
from train.plan.search.candidates import Layout
from train.program import Program, make_program

MODEL = (
    *("model=gpt2_124m", "model.vocab_size=50304", "mesh=ddp"),
    *("data.batch_size=64", "data.sequence_length=1024"),
)
FEW = POLICIES[0], POLICIES[2], POLICIES[-1]
STAGES = Layout(1, 4, pipeline=2, dcn_pipeline=2)
COPIES = Layout(2, 4, dcn_data=2)
PROGRAMS: dict[tuple, Program] = {}
PLANS: dict[int, Plan] = {}


@pytest.fixture(autouse=True)
def estimated_once(monkeypatch):
    """Make and estimate each program once, of three policies, for any budget."""
    monkeypatch.setattr(recomputing, "POLICIES", FEW)

    def make_once(config, devices):
        key = repr(config), devices[0].device_kind, len(devices), jax.__version_info__
        if key not in PROGRAMS:
            PROGRAMS[key] = make_program(config, devices)
        return PROGRAMS[key]

    def estimate_once(program, budget):
        if id(program) not in PLANS:
            PLANS[id(program)] = estimate(program)
        return dataclasses.replace(PLANS[id(program)], budget=budget)

    monkeypatch.setattr(weigh, "make_program", make_once)
    monkeypatch.setattr(weigh, "estimate", estimate_once)


@pytest.fixture
def devices(monkeypatch, tmp_path):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return fake_devices(parse_target("v5e-16"))


@pytest.fixture
def two_slices(devices, monkeypatch):
    """Two slices, on which copies and stages are weighed with one policy."""
    monkeypatch.setattr(recomputing, "POLICIES", POLICIES[:1])
    monkeypatch.setattr(weigh, "layouts", lambda *_: [STAGES, COPIES])
    return fake_devices(parse_target("v5e-4x2"))


@pytest.fixture
def room():
    return memory_budget(parse_target("v5e-16").chip, 0.05)


def budget(size: int) -> MemoryBudget:
    return MemoryBudget(size, size, size)


@pytest.fixture
def config(composed):
    return composed(*MODEL)
