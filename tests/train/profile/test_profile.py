"""A profile is asked for by a file, taken between two steps, and adds up."""

import contextlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from tests.fleet import Fleet, of_text, write_text
from tests.program import module_option
from train.config import RunConfig
from train.distributed.preemption import TRACE
from train.distributed.processes import Cluster
from train.errors import ConfigError
from train.plan.compiled.labels import OTHER, UNNAMED, WAITING, Labels
from train.profile.__main__ import ProfileConfig, main
from train.profile.profiler_trace import read_trace
from train.profile.times import read_times
from train.run import profiles
from train.run.profiles import Profiler, find_profile, request_profile

# jaxlib's reader makes this type when it is first used: Python 3.13 warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats")


class Agreed:
    """Agrees at once on the step after the newest."""

    def __init__(self):
        self.step = 0
        self._due = {}

    def request(self, request):
        self._due[self.step + 1] = int(request.removeprefix(TRACE))

    def steps_to_trace(self, step):
        return self._due.pop(step, 0)


@jax.jit
def step(x):
    with jax.named_scope("layers"), jax.named_scope("part.mlp"):
        for _ in range(4):
            x = jnp.tanh(x @ x)
    with jax.named_scope("optimizer"):
        return x - 0.5


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    """Give the folder of a profile of three steps, asked for while others go on."""
    monkeypatch.setattr(profiles, "_LOOK_S", 0.05)
    config = SimpleNamespace(
        profile=SimpleNamespace(steps=[]), train=SimpleNamespace(num_steps=10**6)
    )
    run = SimpleNamespace(path=epath.Path(tmp_path), config=config)
    agreed = Agreed()
    x = jnp.ones((256, 256))
    compiled = step.lower(x).compile()
    paused = []

    def pause(event):
        paused.append(event)
        return contextlib.nullcontext()

    (tmp_path / "profile_request.json").write_text('{"id": "old", "num_steps": 9}')
    profiler = Profiler(run, Cluster(), agreed, lambda step: compiled.as_text(), pause)
    assert not (tmp_path / "profile_request.json").exists()
    token = request_profile(run.path, 3)
    with contextlib.closing(profiler):
        while (folder := find_profile(run.path, token)) is None:
            agreed.step += 1
            profiler.before(agreed.step)
            profiler.after(agreed.step, step(x))
    assert paused == ["profile"] * 2
    assert agreed.step == int(folder.name) + 2
    assert not (tmp_path / "profile_request.json").exists()
    return folder


def test_the_parts_of_a_profile_add_up(profiled):
    done = json.loads((profiled / "profile.json").read_text())
    assert done["last"] - done["first"] == 2
    text = profiles.gzip.decompress((profiled / "step.hlo.gz").read_bytes()).decode()
    times, devices = read_times(profiled, text)
    assert devices == 1
    assert sum(times.values()) == pytest.approx(done["seconds"], rel=0.03)
    scopes = {label.scope for label in times}
    assert scopes >= {"layers mlp", WAITING}
    assert all("mlp" in s or s in ("optimizer", WAITING, UNNAMED) for s in scopes)
    unnamed = sum(s for label, s in times.items() if label.scope == UNNAMED)
    assert unnamed <= 0.1 * sum(times.values())
    kinds = {label.kind for label in times if label.scope.startswith("layers")}
    assert "products" in kinds
    names = [path.name for path in profiled.glob("plugins/profile/*/*")]
    assert any(name.endswith("_0.xplane.pb") for name in names)


@pytest.mark.parametrize("request_text", ["{", '{"num_steps": 1}', None])
def test_a_store_that_fails_costs_a_profile_and_not_the_training(
    tmp_path, monkeypatch, caplog, request_text
):
    """Nor does a request that was damaged, or withdrawn after it was heard."""
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *args, **options: None)
    monkeypatch.setattr(profiles, "_LOOK_S", 60)
    waited = []
    agreed = Agreed()
    cluster = SimpleNamespace(is_leader=True, processes=2, timeout_s=1.0)
    cluster.wait = lambda *args: waited.append(args)
    config = SimpleNamespace(
        profile=SimpleNamespace(steps=[]), train=SimpleNamespace(num_steps=10)
    )
    run = SimpleNamespace(path=epath.Path(tmp_path), config=config)
    profiler = Profiler(
        *(run, cluster, agreed, lambda step: "", lambda event: contextlib.nullcontext())
    )

    def refuse(*args):
        raise RuntimeError("a store's own words")

    monkeypatch.setattr(profiler, "_keep", refuse)
    if request_text:
        (tmp_path / "profile_request.json").write_text(request_text)
    agreed.request(f"{TRACE}1")
    with contextlib.closing(profiler):
        profiler.before(2)
        profiler.after(2, ())
    assert "a store's own words" in caplog.text
    assert waited == [("profile/2", 1.0)]
    said = "profile_request.json cannot be answered" in caplog.text
    assert said == (request_text is not None)


def test_profiles_are_listed_beside_what_else_lies_there(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    for name in ("10", "9", ".DS_Store", "old"):
        (tmp_path / "profiles" / name).mkdir(parents=True)
        (tmp_path / "profiles" / name / "profile.json").write_text("{}")
    (tmp_path / "profiles/.localized").write_text("")
    asked = ProfileConfig(RunConfig(dir=str(tmp_path)), step=7)
    with pytest.raises(ConfigError, match="existing profile: 9, 10"):
        main(asked)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_hardly_an_instruction_of_a_step_is_unnamed(stored_step, name):
    """Among the instructions of a TPU step that take time, at most 10% are unnamed."""
    compiled = stored_step(name)
    labels = Labels(compiled.text)
    found = {}
    for executed in compiled.module.executed:
        own = executed.instruction
        if own.opcode in ("fusion", "convolution", "copy", "all-reduce"):
            found[own.name] = labels.label(own.name, "jit_train_step(7)")
    unnamed = [name for name, label in found.items() if label.scope == UNNAMED]
    assert len(unnamed) <= 0.1 * len(found)
    kinds = {label.kind for label in found.values()}
    assert kinds >= {"attention", "products", "elementwise", "copies", "collectives"}
    assert labels.label("fusion.1", "jit_eval_step") == (OTHER, OTHER)
    assert labels.label("no_such", "").scope == UNNAMED
    loops = (e for e in compiled.module.executed if e.instruction.opcode == "while")
    assert labels.label(next(loops).instruction.name, "") is None


def command(folder, *more):
    arguments = [f"run.dir={folder}/run", *more]
    return subprocess.run(
        [sys.executable, *module_option("train.profile"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_two_processes_that_run_are_asked(tmp_path):
    tiny = (
        *("model.num_layers=2", "model.embed_dim=32", "model.num_heads=2"),
        *("data=text", *of_text(write_text(tmp_path)), "data.sequence_length=32"),
        *("data.batch_size=8", "tracker=none", "runtime.cpu_devices=2"),
        *("optimizer=adamw", "mesh.data=2", "mesh.fsdp=2", "train.num_steps=1000000"),
    )
    fleet = Fleet(tmp_path, (*tiny, f"run.dir={tmp_path}/run"), 2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    fleet.await_that(lambda: metrics.exists() and '"loss"' in metrics.read_text())
    result = command(tmp_path, "num_steps=3")
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "run" / "profiles").iterdir()
    traces = [read_trace(path) for path in folder.glob("plugins/profile/*/*.xplane.pb")]
    assert len(traces) == 2
    assert "devices     4\n" in result.stdout
    shares = dict(
        re.findall(r"^(\S[\w. ]*?) +[\d.]+ ms +([\d.]+)%", result.stdout, re.M)
    )
    assert {"waiting", "collectives", "attention", "products"} <= shares.keys()
    traced_ms = sum(trace.end - trace.begin for trace in traces) / 2 / 1e6
    for table in result.stdout.split("by scope")[1].split("by kind"):
        each = sum(float(ms) for ms in re.findall(r"([\d.]+) ms", table))
        assert each == pytest.approx(traced_ms / 3, rel=0.001, abs=0.03)
    again = command(tmp_path, f"step={folder.name}")
    assert again.stdout == result.stdout
    fleet.send(15, [0])
    assert fleet.wait() == [42, 42]
    dead = command(tmp_path)
    assert dead.returncode == 78
    assert "no process trains this one" in dead.stderr
    missing = command(tmp_path, "step=1")
    assert missing.returncode == 78
    assert f"an existing profile: {folder.name}" in missing.stderr
