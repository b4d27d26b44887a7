"""The program that measures a GPU, without one."""

import json
import sys
from dataclasses import asdict

import pytest

from benchmarks import gpu
from benchmarks.contenders import EndedEarly
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

    monkeypatch.setattr(gpu, "tokens_per_s", tokens_per_s)
    found = gpu.tune(SPEC)
    assert list(found) == tried
    assert found[gpu.fastest(found)] == max(speeds.values())


def test_where_no_batch_fits_it_says_so(monkeypatch):
    def too_much(spec):
        raise EndedEarly

    monkeypatch.setattr(gpu, "tokens_per_s", too_much)
    with pytest.raises(SystemExit, match="no batch of gpt2_124m fits"):
        gpu.tune(SPEC)


def test_parts_that_fail_cost_no_other_its_figures(monkeypatch, tmp_path, capsys):
    parts = {
        "check": lambda first, presets: gpu.require(False, "not the CPU's"),
        "speed": lambda first, presets: {"preset": presets[0]},
    }
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
    assert "check: not the CPU's" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["levers"] == {"as_is": [1.0]}
    assert found["check"]["failed"] == "not the CPU's"
    assert found["speed"]["preset"] == "nano"
