"""A run under s3:// behaves as on a disk, and waits for a server that is away."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from etils import epath

from data.storage import list_files
from tests.train import command_runs
from tests.train.run.states import like, make_state, same
from train.config import CheckpointConfig
from train.errors import ConfigError
from train.run.checkpoint import Checkpoints
from train.run.digests import digests, find_damage, is_sealed, write_seal
from train.run.folder import run_folder
from train.run.metrics import read_metrics
from train.run.restore import SavedSteps

folder = command_runs.folder
run_command = command_runs.run_command


@pytest.fixture
def remote(server: Any, request: pytest.FixtureRequest) -> epath.Path:
    return run_folder(f"s3://bucket/{request.node.name}") / "checkpoints"


@pytest.fixture
def opened(remote: epath.Path) -> Iterator[Callable[..., Checkpoints]]:
    """Return a function that opens the folder and saves the states of some steps."""
    all_checkpoints = []

    def opened(*steps: int, **config: Any) -> Checkpoints:
        checkpoints = Checkpoints(remote, CheckpointConfig(**config))
        all_checkpoints.append(checkpoints)
        for step in steps:
            assert checkpoints.save(step, make_state(step), {}, last=True) is None
        checkpoints.wait()
        return checkpoints

    yield opened
    for checkpoints in all_checkpoints:
        checkpoints.close()


def spoil(step: epath.Path) -> None:
    name = next(name for name in list_files(step) if "/d/" in name)
    (step / name).write_bytes(b"spoilt")


def test_saved_steps_are_restored_and_deleted_steps_leave_nothing(opened, remote):
    checkpoints = opened(1, 2, 3, 4, keep_latest=2)
    same(checkpoints.saved.restore(like()), make_state(4))
    same(opened().saved.restore(like(), 3), make_state(3))
    top_names = {name.partition("/")[0] for name in list_files(remote)}
    assert top_names == {"3", "4"}, "steps that made way, or marks, were left"
    assert all(is_sealed(remote / top) for top in top_names)


def test_a_damaged_step_is_set_aside_whole_and_stays_there(opened, remote):
    checkpoints = opened(1, 2)
    spoil(remote / "2")
    names = list_files(remote / "2")
    same(checkpoints.saved.restore(like()), make_state(1))
    (quarantined_step,) = (remote / "quarantine").iterdir()
    assert list_files(quarantined_step) == names
    next_start = opened(2)
    same(next_start.saved.restore(like()), make_state(2))
    assert list_files(quarantined_step) == names


def test_leftovers_of_dead_saves_are_removed(opened, remote):
    opened(1)
    (remote / "2" / "state" / "d" / "x").write_text("of a save that was killed")
    (remote / "unsealed" / "2").write_text("")
    reader = SavedSteps(remote)
    assert reader.steps() == [1]
    assert (remote / "2").exists(), "one who only reads removed something"
    same(opened().saved.restore(like()), make_state(1))
    assert not (remote / "2").exists()


def test_a_step_that_is_deleted_while_it_is_hashed_gets_no_seal(opened, remote):
    opened(1)
    hashes = digests(remote / "1")
    (remote / "1").rmtree()
    with pytest.raises(FileNotFoundError):
        write_seal(remote / "1", hashes)
    assert not (remote / "1").exists()


@pytest.mark.slow
def test_a_server_that_is_away_is_no_damage(opened, remote, server):
    opened(1)
    server.leave()
    with pytest.raises(Exception, match="connect"):
        find_damage(remote / "1")
    server.come_back()


@pytest.mark.slow
def test_a_save_waits_for_a_server_that_is_away(opened, server):
    checkpoints = opened(1)
    assert checkpoints.save(2, make_state(2), {}) is None
    server.leave()
    timer = threading.Timer(3, server.come_back)
    timer.start()
    checkpoints.wait()
    timer.join()
    same(checkpoints.saved.restore(like()), make_state(2))


def test_a_tilde_in_the_folder_of_a_run_is_expanded(monkeypatch, tmp_path):
    """A shell does not expand ~ within an argument such as run.dir=~/runs/a."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run_folder("~/runs/a") == tmp_path / "runs/a" == run_folder("runs/a")


def test_a_store_that_cannot_hold_a_run_is_refused(monkeypatch):
    for directory in ("http://host/run", "az://bucket/run"):
        with pytest.raises(ConfigError, match="s3:// or gs://"):
            run_folder(directory)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[gcs\]"):
        run_folder("gs://bucket/run")


def steps_of(run: str) -> list[dict[str, Any]]:
    """Return the values of each step that do not depend on the clock."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    rows = read_metrics(run_folder(run))
    return [{key: row[key] for key in keys} for row in rows if "loss" in row]


@pytest.mark.slow
def test_a_killed_and_continued_run_equals_the_run_on_disk(
    run_command, server, tmp_path
):
    """The run on s3:// is killed twice. Afterwards, every command can read it."""
    local_dir = str(tmp_path / "near")
    remote_dir = "s3://bucket/far"
    credentials = {key: value for key, value in os.environ.items() if "AWS" in key}
    assert run_command(local_dir).returncode == 0
    for at_step in (7, 12):
        attempt = run_command(
            remote_dir,
            at_step=at_step,
            signal_number=signal.SIGKILL,
            environment=credentials,
        )
        assert attempt.returncode == -signal.SIGKILL, attempt.stderr
    last_attempt = run_command(
        remote_dir, ["profile.steps=[18,19]"], environment=credentials
    )
    assert last_attempt.returncode == 0, last_attempt.stderr
    assert steps_of(remote_dir) == steps_of(local_dir)
    run = run_folder(remote_dir)
    same(
        command_runs.state_of(run, 20), command_runs.state_of(epath.Path(local_dir), 20)
    )
    top_names = {name.partition("/")[0] for name in list_files(run)}
    files = {"config.yaml", "starts", "results.json", "report.html", "checkpoints"}
    assert files <= top_names
    assert any(name.endswith(".pb") for name in list_files(run / "profiles"))

    def run_module(module: str, *overrides: str) -> Any:
        command = f"train.{module}"
        return run_command(
            remote_dir, overrides, module=command, config=(), environment=credentials
        )

    assert "DAMAGED" not in run_module("checkpoints").stdout
    spoil(run / "checkpoints" / "20")
    listing = run_module("checkpoints")
    assert (listing.returncode, "DAMAGED" in listing.stdout) == (65, True)
    evaluation = run_module("evaluate", "step=15")
    assert '"step": 15' in evaluation.stdout, evaluation.stderr
    sample = run_module("sample", "step=15", "num_tokens=4")
    assert sample.returncode == 0, sample.stderr
    branch = "s3://bucket/branch"
    arguments = (f"from={remote_dir}@15", f"run.dir={branch}")
    result = run_command(
        remote_dir, arguments, module="train.branch", config=(), environment=credentials
    )
    assert result.returncode == 0, result.stderr
    assert steps_of(branch) == steps_of(local_dir)
