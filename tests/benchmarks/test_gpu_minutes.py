"""The parts that fit into a few minutes are chosen with a fake clock."""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import gpu, gpu_minutes, gpu_turns
from benchmarks.contenders import EndedEarly
from benchmarks.gpu_minutes import MARGIN_S, run_within
from benchmarks.longhaul import step_overrides
from benchmarks.step_worker import PRESETS, Spec
from model.catalog import MODEL_PARTS
from model.count import num_params
from model.gpt import abstract_gpt
from tests.fleet import REPOSITORY
from train.cli.command import compose

SPEC = Spec("longhaul", "nano", "cpu", 2)


class Machine:
    """A clock that advances by the seconds that each part takes, up to its limit."""

    def __init__(self, **seconds: float) -> None:
        self.now = 1000.0
        self.seconds = seconds
        self.limits: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    def run(self, part, device, file, limit_s):
        self.limits[part] = limit_s
        self.now += min(self.seconds[part], limit_s)
        return "killed" if self.seconds[part] > limit_s else None


@pytest.fixture
def guesses(monkeypatch):
    parts = {"first": {"gpu": 100.0}, "second": {"gpu": 200.0}, "third": {"gpu": 50.0}}
    monkeypatch.setattr(gpu_minutes, "PARTS", parts)


def run_on(machine: Machine, minutes: float, file):
    return run_within(minutes, "gpu", file, machine.run, machine.clock)


@pytest.mark.usefixtures("guesses")
def test_a_part_that_does_not_fit_is_skipped_and_a_shorter_one_follows(
    tmp_path, capsys
):
    file = tmp_path / "gpu.json"
    machine = Machine(first=120, third=50)
    assert run_on(machine, (300 + MARGIN_S) / 60, file) == []
    assert list(machine.limits) == ["first", "third"]
    results = json.loads(file.read_text())
    reason = "needs about 200 s, and 180 s are left"
    assert results == {"second": {"skipped": reason}}
    assert reason in capsys.readouterr().out


@pytest.mark.usefixtures("guesses")
def test_a_part_that_does_not_end_is_killed_and_the_next_one_follows(tmp_path):
    file = tmp_path / "gpu.json"
    machine = Machine(first=9999, second=9999, third=1)
    began = machine.now
    failures = run_on(machine, (430 + MARGIN_S) / 60, file)
    assert failures == ["first: killed", "second: killed"]
    assert machine.limits == {"first": 200, "second": 230}  # no seconds are left
    assert machine.now <= began + 430
    results = json.loads(file.read_text())
    assert results["first"] == {"failed": "killed"}
    assert "skipped" in results["third"]


@pytest.mark.usefixtures("guesses")
@pytest.mark.parametrize(
    ("entry", "limit"),
    [
        ({"device": "gpu", "seconds": 30.0}, 60.0),
        ({"device": "cpu", "seconds": 30.0}, 200.0),  # another machine
        ({"device": "gpu", "failed": "killed"}, 200.0),
    ],
)
def test_the_seconds_of_an_earlier_call_replace_a_guess(tmp_path, entry, limit):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"first": entry}))
    machine = Machine(first=1, second=1, third=1)
    run_on(machine, 60, file)
    assert machine.limits["first"] == limit


@pytest.mark.usefixtures("guesses")
def test_a_skipped_part_keeps_its_earlier_results(tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text('{"second": {"device": "gpu", "seconds": 999.0, "rows": [1]}}')
    run_on(Machine(first=1, third=1), 10, file)
    second = json.loads(file.read_text())["second"]
    assert (second["rows"], second["seconds"]) == ([1], 999.0)
    assert "skipped" in second


def test_a_killed_part_leaves_no_process(monkeypatch, tmp_path):
    """The part starts a process of its own, as parts start contenders."""
    program = tmp_path / "part"
    pid_file = tmp_path / "pid"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {pid_file}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert gpu_minutes.run_part("check", "cpu", None, 2.0) == "killed after 2 s"
    command = ["ps", "-o", "stat=", "-p", pid_file.read_text().strip()]
    state = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    assert state[:1] in ("", "Z")


def test_every_part_with_a_guess_is_a_part_of_the_program():
    assert set(gpu_minutes.PARTS) <= set(gpu.PARTS)


class Steady:
    """A contender whose every step takes a second; some run out of memory."""

    def __init__(self, spec: Spec, failing: str = "") -> None:
        self.spec = spec
        self.name = spec.name
        self.blocks: list[float] = []
        self.memory = 0
        self.fails = spec.name == failing

    def run(self, num_steps: int) -> None:
        if self.fails:
            raise EndedEarly
        self.blocks.append(1.0)

    def ask(self, command: str) -> dict[str, int]:
        return {}


def contenders_of(monkeypatch, failing: str = "") -> list[Spec]:
    """Replace the processes of contenders; return the list of those that start."""
    started: list[Spec] = []

    @contextlib.contextmanager
    def running(spec):
        started.append(spec)
        yield Steady(spec, failing)

    monkeypatch.setattr(gpu_turns, "running", running)
    return started


def test_a_contender_that_ends_early_does_not_stop_the_others(monkeypatch):
    started = contenders_of(monkeypatch, failing=gpu_minutes.TORCH)
    results = []
    with pytest.raises(SystemExit, match=rf"^{gpu_minutes.TORCH} ended early"):
        results.extend(gpu_minutes.llama(SPEC, []))
    others = ["longhaul", "longhaul-float8"]
    names = [spec.name for spec in started]
    assert names == ["longhaul", gpu_minutes.TORCH, *others[1:], *reversed(others)]
    assert [row["contender"] for row in results[-1]["rows"]] == others
    assert [len(row["blocks_ms"]) for row in results[-1]["rows"]] == [6, 6]


def test_contenders_train_the_same_shape_and_differ_in_overrides(monkeypatch):
    started = contenders_of(monkeypatch)
    for part in (gpu_minutes.documents, gpu_minutes.large, gpu_minutes.llama):
        started.clear()
        results = list(part(replace(SPEC, device="gpu"), []))
        assert len({spec.shape for spec in started}) == 1
        assert results[-1]["rows"][0]["speed_to_torch"] == 1
    assert started[0].shape == PRESETS["llama3_8b"]
    overrides = {spec.name: spec.overrides for spec in started}
    assert overrides["longhaul-float8"] == ("model.compute_dtype=float8",)
    assert overrides["longhaul"] == ()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_shape_has_the_parameters_and_flops_of_longhauls_model(preset):
    torch = pytest.importorskip("torch")

    from benchmarks.torch_gpt import GPT, fused_attention

    shape = PRESETS[preset]
    with torch.device("meta"):
        model = GPT(shape, fused_attention)
    size = sum(parameter.numel() for parameter in model.parameters())
    config = compose(step_overrides(shape)).model
    assert size == num_params(abstract_gpt(config, MODEL_PARTS))
    matrices = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and name != "positions"
    ]
    if shape.num_kv_heads:  # The embedding is not the head.
        matrices.remove(shape.vocab_size * shape.embed_dim)
    scores = 12 * shape.num_layers * shape.embed_dim * shape.context
    assert shape.flops == (6 * sum(matrices) + scores) * shape.tokens


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_minutes_end_with_results_on_a_cpu(tmp_path):
    """Without PyTorch, comparisons fail, but Longhaul's results are in the file."""
    file = tmp_path / "gpu.json"
    earlier = {"device": "cpu", "seconds": 400.0}  # A loaded machine is slow.
    file.write_text(json.dumps(dict.fromkeys(gpu_minutes.PARTS, earlier)))
    args = ["-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "40"]
    completed = subprocess.run(
        [sys.executable, *args, "--json", str(file)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    results = json.loads(file.read_text())
    for part in ("check", "profile"):
        assert "failed" not in results[part], completed.stdout
    for part in ("documents", "large", "llama"):
        rows = [row["contender"] for row in results[part]["rows"]]
        assert rows[0] == "longhaul", completed.stdout
    assert "longhaul-float8" in rows
