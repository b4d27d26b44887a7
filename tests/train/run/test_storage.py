"""A run under s3://, on a server that speaks it: as on a disk, and when it is away."""

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import jax
import pytest
from etils import epath

from data.storage import list_files
from tests.fleet import REPOSITORY
from tests.train.run.states import like, make_state, same
from train.config import CheckpointConfig
from train.errors import ConfigError
from train.program import make_program
from train.run.checkpoint import Checkpoints
from train.run.digests import damage, digests, is_sealed, write_seal
from train.run.folder import run_folder
from train.run.metrics import read_metrics
from train.run.restore import SavedSteps
from train.run.starts import read_run
from train.state import TrainState

TINY = (
    *("model.num_layers=2", "model.embed_dim=32", "model.num_heads=2"),
    *("model.compute_dtype=float32", "model.init=scaled", "optimizer=adamw"),
    *("data=text", "data.sequence_length=32", "data.batch_size=8", "tracker=none"),
    *("runtime.cpu_devices=2", "schedule.warmup_steps=2", "train.num_steps=12"),
    *("checkpoint.save_interval_steps=4", "checkpoint.keep_latest=2"),
    "log.interval_steps=1",
)

# The door, with steps that are slow enough for each save to be through, and a hand
# that kills the process.
KILLED = """
import os
import signal
from train.__main__ import main
from train.run.checkpoint import Checkpoints
from train.cli.command import run_command
from train.run.directory import RunDir

write, save = RunDir.log, Checkpoints.save

def write_and_die(log, step, values):
    write(log, step, values)
    if step == int(os.environ["AT_STEP"]):
        os.kill(os.getpid(), signal.SIGKILL)

def save_after_the_one_before(checkpoints, step, state, about, last=False):
    return save(checkpoints, step, state, about, True)

RunDir.log, Checkpoints.save = write_and_die, save_after_the_one_before

if __name__ == "__main__":
    run_command(main)
"""

Door = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(server: Any, request: pytest.FixtureRequest) -> epath.Path:
    return run_folder(f"s3://bucket/{request.node.name}") / "checkpoints"


@pytest.fixture
def opened(folder: epath.Path) -> Iterator[Callable[..., Checkpoints]]:
    """Open the folder and save the states of some steps."""
    all_opened = []

    def opened(*steps: int, **config: Any) -> Checkpoints:
        checkpoints = Checkpoints(folder, CheckpointConfig(**config))
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


def test_what_was_saved_comes_back_and_what_made_way_leaves_nothing(opened, folder):
    checkpoints = opened(1, 2, 3, 4, keep_latest=2)
    same(checkpoints.saved.restore(like()), make_state(4))
    same(opened().saved.restore(like(), 3), make_state(3))
    tops = {name.partition("/")[0] for name in list_files(folder)}
    assert tops == {"3", "4"}, "steps that made way, or marks, were left"
    assert all(is_sealed(folder / top) for top in tops)


def test_a_damaged_step_is_set_aside_whole_and_stays_there(opened, folder):
    checkpoints = opened(1, 2)
    spoil(folder / "2")
    names = list_files(folder / "2")
    same(checkpoints.saved.restore(like()), make_state(1))
    (aside,) = (folder / "quarantine").iterdir()
    assert list_files(aside) == names
    again = opened(2)
    same(again.saved.restore(like()), make_state(2))
    assert list_files(aside) == names


def test_leftovers_of_dead_saves_are_removed(opened, folder):
    opened(1)
    (folder / "2" / "state" / "d" / "x").write_text("of a save that was killed")
    (folder / "unsealed" / "2").write_text("")
    reader = SavedSteps(folder)
    assert reader.steps() == [1]
    assert (folder / "2").exists(), "one who only reads removed something"
    same(opened().saved.restore(like()), make_state(1))
    assert not (folder / "2").exists()


def test_what_others_write_is_seen(folder):
    (folder / "1" / "mine").write_text("")
    assert [path.name for path in folder.iterdir()] == ["1"]
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    other.pipe_file(f"{folder}/2/theirs", b"")
    assert [path.name for path in folder.iterdir()] == ["1", "2"]


def test_a_step_that_makes_way_while_it_is_hashed_gets_no_seal(opened, folder):
    opened(1)
    found = digests(folder / "1")
    (folder / "1").rmtree()
    with pytest.raises(FileNotFoundError):
        write_seal(folder / "1", found)
    assert not (folder / "1").exists()


@pytest.mark.slow
def test_a_store_that_is_away_makes_no_step_a_damaged_one(opened, folder, server):
    opened(1)
    server.leave()
    try:
        with pytest.raises(Exception, match="connect"):
            damage(folder / "1")
    finally:
        server.come_back()
    assert damage(folder / "1") is None


@pytest.mark.slow
def test_a_save_waits_for_a_server_that_is_away(opened, folder, server):
    checkpoints = opened(1)
    assert checkpoints.save(2, make_state(2), {}) is None
    server.leave()
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


@pytest.fixture(scope="module")
def door(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Door:
    """Run a door in a process of its own, given the run and overrides."""
    here = tmp_path_factory.mktemp("runs")
    (here / "text.txt").write_text(inspect.getsource(textwrap) * 2)
    (here / "killed.py").write_text(KILLED)
    data = (f"data.path={here}/text.txt", f"data.cache_dir={here}/data")

    def run(
        directory: str, *overrides: str, at_step: int = 0, module: str = ""
    ) -> subprocess.CompletedProcess[str]:
        train = [str(here / "killed.py")]
        given = overrides if module else (*TINY, *data, *overrides)
        return subprocess.run(
            [
                *(sys.executable, *(["-m", module] if module else train)),
                *(f"run.dir={directory}", *given),
            ],
            cwd=here,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "AT_STEP": str(at_step),
                "JAX_PLATFORMS": "cpu",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def steps_of(run: str) -> list[dict[str, Any]]:
    """Return what is no clock's of each step's line."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    rows = read_metrics(run_folder(run))
    return [{key: row[key] for key in keys} for row in rows if "loss" in row]


def end_of(run: str) -> TrainState:
    config = read_run(run)
    folder = run_folder(run) / "checkpoints"
    program = make_program(config, jax.devices()[:2])
    state = SavedSteps(folder).restore(program.state)
    assert state is not None
    return state


@pytest.mark.slow
def test_a_run_killed_and_continued_is_the_run_on_disk(door, tmp_path):
    """Killed while it saves, and again once it has gone on."""
    near, far = str(tmp_path / "near"), "s3://bucket/far"
    assert door(near).returncode == 0
    for at_step in (5, 9):
        killed = door(far, at_step=at_step)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = door(far)
    assert ended.returncode == 0, ended.stderr
    assert steps_of(far) == steps_of(near)
    same(end_of(far), end_of(near))
    tops = {name.partition("/")[0] for name in list_files(run_folder(far))}
    files = {"config.yaml", "starts", "results.json", "report.html", "checkpoints"}
    assert files <= tops
    checkpoints = run_folder(far) / "checkpoints"
    assert {p.name for p in checkpoints.iterdir()} == {"8", "12"}
    listed = door(far, module="train.checkpoints").stdout
    assert listed.count("verified") == 2
    spoil(checkpoints / "12")
    listed = door(far, module="train.checkpoints")
    assert (listed.returncode, "DAMAGED" in listed.stdout) == (65, True)
    scored = door(far, "step=8", module="train.evaluate")
    assert '"step": 8' in scored.stdout, scored.stderr
    sampled = door(far, "step=8", "num_tokens=4", module="train.sample")
    assert sampled.returncode == 0, sampled.stderr


@pytest.mark.slow
def test_a_profile_goes_where_the_run_is(door):
    run = "s3://bucket/profiled"
    ended = door(run, "train.num_steps=4", "profile.steps=[2,3]")
    assert ended.returncode == 0, ended.stderr
    assert any(
        name.endswith(".pb") for name in list_files(run_folder(run) / "profiles")
    )
