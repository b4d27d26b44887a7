"""The program that measures a GPU is tested without one."""

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


def test_a_worker_receives_the_whole_spec(tmp_path):
    received = Spec(**json.loads(json.dumps(asdict(SPEC))))
    assert asdict(received) == {**asdict(SPEC), "overrides": ["seed=1"]}
    assert received.shape.tokens == 64 * 1024


@pytest.mark.parametrize(
    ("speeds", "tried"),
    [
        ({16: 1.0, 32: 2.0, 64: 3.0, 128: 4.0}, [16, 32, 64, 128]),
        ({16: 1.0, 32: 3.0, 64: 2.0}, [16, 32, 64]),  # a slower size ends the search
        ({16: 1.0, 32: 2.0}, [16, 32]),  # the next size does not fit
    ],
)
def test_batches_grow_while_that_is_faster_and_they_fit(monkeypatch, speeds, tried):
    def tokens_per_s(spec):
        if spec.batch_size not in speeds:
            raise EndedEarly
        return speeds[spec.batch_size]

    monkeypatch.setattr(gpu_turns, "tokens_per_s", tokens_per_s)
    measurements = gpu.tune(SPEC)
    assert list(measurements) == tried
    assert measurements[gpu.fastest(measurements)] == max(speeds.values())


def test_it_is_an_error_if_no_batch_fits(monkeypatch):
    def run_out_of_memory(spec):
        raise EndedEarly

    monkeypatch.setattr(gpu_turns, "tokens_per_s", run_out_of_memory)
    with pytest.raises(SystemExit, match="no batch of gpt2_124m fits"):
        gpu.tune(SPEC)


def crashing_part(first, presets):
    """Yield one result, and then fail with an error that no part expects."""
    yield {"whole": 1.5}
    raise KeyError("eval/loss")


def failing_part(first, presets):
    yield {"found": 2}
    gpu.require(False, "not the CPU's")


def working_part(first, presets):
    yield {"preset": presets[0]}


def test_a_failed_part_keeps_its_results_and_the_others(monkeypatch, tmp_path, capsys):
    parts = {"check": failing_part, "run": crashing_part, "speed": working_part}
    monkeypatch.setattr(gpu, "PARTS", parts)
    file = tmp_path / "gpu.json"
    file.write_text('{"levers": {"as_is": [1.0]}}')
    monkeypatch.setattr(
        *(sys, "argv"),
        ["gpu", "--device", "cpu", "--json", str(file), "--parts", *parts],
    )
    with pytest.raises(SystemExit) as exit_:
        gpu.main()
    assert exit_.value.code == 1
    output = capsys.readouterr()
    assert "check: not the CPU's" in output.out
    assert "run: KeyError: 'eval/loss'" in output.out
    assert "Traceback" in output.err
    data = json.loads(file.read_text())
    assert data["levers"] == {"as_is": [1.0]}
    assert (data["check"]["failed"], data["check"]["found"]) == ("not the CPU's", 2)
    assert data["run"]["whole"] == 1.5
    assert data["speed"]["preset"] == "nano"


class FakeContender:
    """A contender whose losses equal the CPU's in float32 alone."""

    def __init__(self, spec):
        self.spec = spec

    def ask(self, command):
        if command == "kernels":
            return {"__cudnn$fmhaSoftmax": 12}
        loss = 2.0 if command == "run 1" else 1.0
        return {"loss": loss if self.spec.float32 else loss * 1.1}


def test_float32_is_checked_without_cudnn_and_all_is_reported(monkeypatch):
    specs = []

    @contextlib.contextmanager
    def running(spec):
        specs.append(spec)
        yield FakeContender(spec)

    monkeypatch.setattr(gpu, "running", running)
    results = []
    with pytest.raises(SystemExit, match=r"^gpu, auto: not the CPU's$"):
        results.extend(gpu.check(SPEC, ["gpt2_124m"]))
    assert {"gpu, float32": [2.0, 1.0]} in results
    assert {"kernels": {"__cudnn$fmhaSoftmax": 12}} in results
    xla = ["model.attention=xla" in spec.overrides for spec in specs]
    assert xla == [True, True, False]


def test_each_command_to_a_dead_worker_reports_that_it_ended():
    worker = object.__new__(Contender)
    worker.name = "longhaul"
    worker.process = subprocess.Popen(
        ["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker.process.wait()
    with pytest.raises(EndedEarly, match="longhaul ended early"):
        worker.ask("warm")
    worker.quit()


def test_a_gpu_without_a_name_does_not_stop_the_benchmark(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "a GPU" in hardware("gpu")
