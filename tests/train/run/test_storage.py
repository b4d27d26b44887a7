"""A run under s3://, on a server that speaks it: as on a disk, and when it is away."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from etils import epath

from data.storage import list_files
from tests.train import doors
from tests.train.run.states import like, make_state, same
from train.config import CheckpointConfig
from train.errors import ConfigError
from train.run.checkpoint import Checkpoints
from train.run.digests import digests, find_damage, is_sealed, write_seal
from train.run.folder import run_folder
from train.run.metrics import read_metrics
from train.run.restore import SavedSteps

folder = doors.folder
door = doors.door


@pytest.fixture
def remote(server: Any, request: pytest.FixtureRequest) -> epath.Path:
    return run_folder(f"s3://bucket/{request.node.name}") / "checkpoints"


@pytest.fixture
def opened(remote: epath.Path) -> Iterator[Callable[..., Checkpoints]]:
    """Open the folder and save the states of some steps."""
    all_opened = []

    def opened(*steps: int, **config: Any) -> Checkpoints:
        checkpoints = Checkpoints(remote, CheckpointConfig(**config))
        all_opened.append(checkpoints)
        for step in steps:
            assert checkpoints.save(step, make_state(step), {}, last=True) is None
        checkpoints.wait()
        return checkpoints

    yield opened
    for checkpoints in all_opened:
        checkpoints.close()


def spoil(step: epath.Path) -> None:
    name = next(name for name in list_files(step) if "/d/" in name)
    (step / name).write_bytes(b"spoilt")


def test_what_was_saved_comes_back_and_what_made_way_leaves_nothing(opened, remote):
    checkpoints = opened(1, 2, 3, 4, keep_latest=2)
    same(checkpoints.saved.restore(like()), make_state(4))
    same(opened().saved.restore(like(), 3), make_state(3))
    tops = {name.partition("/")[0] for name in list_files(remote)}
    assert tops == {"3", "4"}, "steps that made way, or marks, were left"
    assert all(is_sealed(remote / top) for top in tops)


def test_a_damaged_step_is_set_aside_whole_and_stays_there(opened, remote):
    checkpoints = opened(1, 2)
    spoil(remote / "2")
    names = list_files(remote / "2")
    same(checkpoints.saved.restore(like()), make_state(1))
    (aside,) = (remote / "quarantine").iterdir()
    assert list_files(aside) == names
    again = opened(2)
    same(again.saved.restore(like()), make_state(2))
    assert list_files(aside) == names


def test_leftovers_of_dead_saves_are_removed(opened, remote):
    opened(1)
    (remote / "2" / "state" / "d" / "x").write_text("of a save that was killed")
    (remote / "unsealed" / "2").write_text("")
    reader = SavedSteps(remote)
    assert reader.steps() == [1]
    assert (remote / "2").exists(), "one who only reads removed something"
    same(opened().saved.restore(like()), make_state(1))
    assert not (remote / "2").exists()


def test_a_step_that_makes_way_while_it_is_hashed_gets_no_seal(opened, remote):
    opened(1)
    found = digests(remote / "1")
    (remote / "1").rmtree()
    with pytest.raises(FileNotFoundError):
        write_seal(remote / "1", found)
    assert not (remote / "1").exists()


@pytest.mark.slow
def test_a_save_waits_for_a_server_that_is_away(opened, remote, server):
    checkpoints = opened(1)
    assert checkpoints.save(2, make_state(2), {}) is None
    server.leave()
    with pytest.raises(Exception, match="connect"):  # which is no damage
        find_damage(remote / "1")
    back = threading.Timer(3, server.come_back)
    back.start()
    checkpoints.wait()
    back.join()
    same(checkpoints.saved.restore(like()), make_state(2))


def test_a_folder_is_where_a_shell_has_it(monkeypatch, tmp_path):
    """It expands no ~ within an argument such as run.dir=~/runs/a."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run_folder("~/runs/a") == tmp_path / "runs/a" == run_folder("runs/a")


def test_what_holds_no_run_is_refused(monkeypatch):
    for directory in ("http://host/run", "az://bucket/run"):
        with pytest.raises(ConfigError, match="s3:// or gs://"):
            run_folder(directory)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[gcs\]"):
        run_folder("gs://bucket/run")


def steps_of(run: str) -> list[dict[str, Any]]:
    """Return what is no clock's of each step's line."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    rows = read_metrics(run_folder(run))
    return [{key: row[key] for key in keys} for row in rows if "loss" in row]


@pytest.mark.slow
def test_a_run_killed_and_continued_is_the_run_on_disk(door, server, tmp_path):
    """Killed twice, by another process; then all commands find it there."""
    near = str(tmp_path / "near")
    far = "s3://bucket/far"
    store = {key: value for key, value in os.environ.items() if "AWS" in key}
    assert door(near).returncode == 0
    for at_step in (7, 12):
        killed = door(far, at_step=at_step, number=signal.SIGKILL, environment=store)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = door(far, "profile.steps=[18,19]", environment=store)
    assert ended.returncode == 0, ended.stderr
    assert steps_of(far) == steps_of(near)
    run = run_folder(far)
    same(doors.state_of(run, 20), doors.state_of(epath.Path(near), 20))
    tops = {name.partition("/")[0] for name in list_files(run)}
    files = {"config.yaml", "starts", "results.json", "report.html", "checkpoints"}
    assert files <= tops
    assert any(name.endswith(".pb") for name in list_files(run / "profiles"))

    def other(module: str, *overrides: str) -> Any:
        command = f"train.{module}"
        return door(far, *overrides, module=command, config=(), environment=store)

    assert "DAMAGED" not in other("checkpoints").stdout
    spoil(run / "checkpoints" / "20")
    listed = other("checkpoints")
    assert (listed.returncode, "DAMAGED" in listed.stdout) == (65, True)
    scored = other("evaluate", "step=15")
    assert '"step": 15' in scored.stdout, scored.stderr
    sampled = other("sample", "step=15", "num_tokens=4")
    assert sampled.returncode == 0, sampled.stderr
    branch = "s3://bucket/branch"
    words = (f"from={far}@15", f"run.dir={branch}")
    branched = door(far, *words, module="train.branch", config=(), environment=store)
    assert branched.returncode == 0, branched.stderr
    assert steps_of(branch) == steps_of(near)
