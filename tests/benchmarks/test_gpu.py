"""The program that measures a GPU, without one."""

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks import gpu, gpu_turns
from benchmarks.contenders import Contender, EndedEarly, hardware
from benchmarks.step_worker import Spec

SPEC = Spec("longhaul", "gpt2_124m", "gpu", 2, overrides=("seed=1",))


def test_a_worker_is_told_all(tmp_path):
    told = Spec(**json.loads(json.dumps(asdict(SPEC))))
    assert asdict(told) == {**asdict(SPEC), "overrides": ["seed=1"]}
    assert told.shape.tokens == 64 * 1024


@pytest.mark.parametrize(
    ("speeds", "tried"),
    [
        ({16: 1.0, 32: 2.0, 64: 3.0, 128: 4.0}, [16, 32, 64, 128]),
        ({16: 1.0, 32: 3.0, 64: 2.0}, [16, 32, 64]),  # and no further
        ({16: 1.0, 32: 2.0}, [16, 32]),  # more does not fit
    ],
)
def test_batches_grow_while_that_is_faster_and_they_fit(monkeypatch, speeds, tried):
    def tokens_per_s(spec):
        if spec.batch_size not in speeds:
            raise EndedEarly
        return speeds[spec.batch_size]

    monkeypatch.setattr(gpu_turns, "tokens_per_s", tokens_per_s)
    found = gpu.tune(SPEC)
    assert list(found) == tried
    assert found[gpu.fastest(found)] == max(speeds.values())


def test_where_no_batch_fits_it_says_so(monkeypatch):
    def too_much(spec):
        raise EndedEarly

    monkeypatch.setattr(gpu_turns, "tokens_per_s", too_much)
    with pytest.raises(SystemExit, match="no batch of gpt2_124m fits"):
        gpu.tune(SPEC)


def damaged(first, presets):
    """Find one thing, and fail of another as no part means to."""
    yield {"whole": 1.5}
    raise KeyError("eval/loss")


def wrong(first, presets):
    yield {"found": 2}
    gpu.require(False, "not the CPU's")


def right(first, presets):
    yield {"preset": presets[0]}


def test_parts_that_fail_cost_no_other_its_figures(monkeypatch, tmp_path, capsys):
    parts = {"check": wrong, "run": damaged, "speed": right}
    monkeypatch.setattr(gpu, "PARTS", parts)
    file = tmp_path / "gpu.json"
    file.write_text('{"levers": {"as_is": [1.0]}}')
    monkeypatch.setattr(
        *(sys, "argv"),
        ["gpu", "--device", "cpu", "--json", str(file), "--parts", *parts],
    )
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "check: not the CPU's" in shown.out
    assert "run: KeyError: 'eval/loss'" in shown.out
    assert "Traceback" in shown.err
    found = json.loads(file.read_text())
    assert found["levers"] == {"as_is": [1.0]}
    assert (found["check"]["failed"], found["check"]["found"]) == ("not the CPU's", 2)
    assert found["run"]["whole"] == 1.5
    assert found["speed"]["preset"] == "nano"


class Trained:
    """A contender whose loss falls as the CPU's does, but for one."""

    def __init__(self, spec):
        self.spec = spec

    def ask(self, command):
        if command == "kernels":
            return {"__cudnn$fmhaSoftmax": 12}
        loss = 2.0 if command == "run 1" else 1.0
        return {"loss": loss if self.spec.float32 else loss * 1.1}


def test_float32_is_checked_without_cudnn_and_all_is_told(monkeypatch):
    asked = []

    @contextlib.contextmanager
    def running(spec):
        asked.append(spec)
        yield Trained(spec)

    monkeypatch.setattr(gpu, "running", running)
    found = []
    with pytest.raises(SystemExit, match=r"^gpu, auto: not the CPU's$"):
        found.extend(gpu.check(SPEC, ["gpt2_124m"]))
    assert {"gpu, float32": [2.0, 1.0]} in found
    assert {"kernels": {"__cudnn$fmhaSoftmax": 12}} in found
    xla = ["model.attention=xla" in spec.overrides for spec in asked]
    assert xla == [True, True, False, False]


def test_a_worker_that_died_is_said_to_have_whenever_it_is_asked():
    worker = object.__new__(Contender)
    worker.name = "longhaul"
    worker.process = subprocess.Popen(
        ["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker.process.wait()
    with pytest.raises(EndedEarly, match="longhaul ended early"):
        worker.ask("warm")
    worker.quit()


def test_a_gpu_without_a_name_costs_no_figures(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "a GPU" in hardware("gpu")
