"""The line that says how to go on."""

import shlex

import pytest
from etils import epath

from train import results as summary
from train.cli.command import compose
from train.identity import run_dir
from train.results import print_results

FOUND = {
    **{"step": 30, "eval/loss": 1.0, "eval/bits_per_byte": 1.0, "sample": "x"},
    **{"validation_bytes": 1, "compressed": {}},
}


@pytest.mark.parametrize(
    "typed",
    [
        ("train.num_steps=30",),
        ("train.num_steps=30", "schedule.final_fraction=0.1"),
        ("run.name=mine", "data.path=a b"),
        ("schedule=constant",),
    ],
)
def test_it_means_the_same_run_and_each_key_once(typed, monkeypatch, capsys):
    monkeypatch.setattr(summary, "read_events", lambda path: [])
    monkeypatch.setattr(summary, "account", lambda events: "")
    config = compose(typed)
    command = shlex.join(["python", "-m", "train", *typed])
    print_results(FOUND, command, config, epath.Path(run_dir(config)))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "to go on" in x]
    overrides = shlex.split(line)[6:]
    keys = [override.partition("=")[0] for override in overrides]
    assert len({*keys}) == len(keys)
    after = compose(overrides)
    assert run_dir(after) == run_dir(config)
    assert after.train.num_steps == 60
    assert after.schedule.final_fraction != 0 or after.schedule.name == "constant"
