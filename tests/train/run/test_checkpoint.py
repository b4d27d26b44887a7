"""Checkpoints: what is saved comes back, and what is damaged is set aside."""

import gc
import os
import shutil
import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from data.batches import Order
from data.errors import DataError
from tests.train.run.states import like, make_state, same
from train.checkpoints import CheckpointsConfig, main
from train.config import CheckpointConfig, RunConfig
from train.errors import ConfigError, Exit
from train.feed import place
from train.run.checkpoint import Checkpoints
from train.run.digests import SEAL, damage, is_sealed
from train.run.restore import SavedSteps
from train.sharding import state_shardings

ABOUT = {"step": 0}


@pytest.fixture
def folder(tmp_path: Path) -> epath.Path:
    return epath.Path(tmp_path / "checkpoints")


@pytest.fixture
def saved(folder):
    """Open the folder and save the states of some steps."""
    opened = []

    def saved(*steps: int, **config) -> Checkpoints:
        checkpoints = Checkpoints(folder, CheckpointConfig(**config))
        opened.append(checkpoints)
        for step in steps:
            checkpoints.save(step, make_state(step), ABOUT)
        checkpoints.wait()
        return checkpoints

    yield saved
    for checkpoints in opened:
        checkpoints.close()


def test_what_was_saved_comes_back_to_the_bit(saved):
    """The state may be donated as soon as `save` returns."""
    checkpoints, state = saved(1), make_state(2)
    checkpoints.save(2, state, ABOUT)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    checkpoints.wait()
    same(checkpoints.saved.restore(like()), make_state(2))
    same(checkpoints.saved.restore(like(), 1), make_state(1))


def test_the_best_step_outlives_newer_ones(saved, folder):
    checkpoints = saved(keep_best=True, keep_latest=1)
    with pytest.raises(ConfigError, match="no checkpoint there was evaluated"):
        checkpoints.saved.best()
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0}
    better = []
    for step in range(1, 6):
        better.append(step in losses and checkpoints.judge(step, losses[step]))
        checkpoints.save(step, make_state(step), ABOUT)
        checkpoints.wait()
    assert better == [True, True, False, False, False]
    reader = SavedSteps(folder)
    assert (reader.steps(), reader.best()) == ([2, 5], 2)
    same(reader.restore(like()), make_state(5))
    assert [saved(keep_best=True).judge(6, loss) for loss in (1.5, 0.5)] == [
        False,
        True,
    ]


def test_no_checkpoint_is_a_fresh_start(saved):
    assert saved().saved.restore(like()) is None
    with pytest.raises(DataError, match="no checkpoint yet"):
        saved().saved.restore_params(like())


def test_tables_saved_before_they_were_padded_come_back_with_zeros(folder):
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(1, make_state(1, size=1030), ABOUT)
    checkpoints.wait()
    state = checkpoints.saved.restore(like(1152))
    table = np.asarray(state.params["w"])
    same(table[:1030], make_state(1, size=1030).params["w"])
    assert table.shape == (1152, 8)
    assert not table[1030:].any()
    for size in (1029, 1031, 1280):
        with pytest.raises(ValueError, match=r"with the shape \(1030, 8\)"):
            checkpoints.saved.restore(like(size))
    checkpoints.close()


GUARDED = ("train.skip_sigma=4", "train.skip_window=4")


def test_a_run_that_watches_for_spikes_goes_on_to_the_bit(programs, store, folder):
    program = programs(*GUARDED, devices=1)
    order = Order(store, program.config.data, 0)

    def steps(state, first: int, last: int):
        with jax.set_mesh(program.mesh):
            for step in range(first, last):
                batch = place(order.read(step), program.batch)
                state, _ = program.train_step(state, batch)
        return state

    state, checkpoints = (
        steps(program.init(), 0, 6),
        Checkpoints(folder, CheckpointConfig()),
    )
    checkpoints.save(6, state, ABOUT)
    checkpoints.wait()
    expected = jax.device_get(steps(state, 6, 9))
    restored = checkpoints.saved.restore(program.state)
    assert int(restored.recent.num_accepted) == 6
    same(jax.device_get(steps(restored, 6, 9)), expected)
    checkpoints.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [((), GUARDED), (GUARDED, ()), (GUARDED, (GUARDED[0], "train.skip_window=8"))],
    ids=["on", "off", "window"],
)
def test_recent_steps_that_are_not_there_begin_empty(programs, folder, before, after):
    """Whoever allowed train.skip_sigma to change finds the rest as it was."""
    old, new = programs(*before, devices=1), programs(*after, devices=1)
    state, checkpoints = old.init(), Checkpoints(folder, CheckpointConfig())
    if state.recent is not None:
        state = state._replace(recent=jax.tree.map(lambda x: x + 3, state.recent))
    checkpoints.save(0, state, ABOUT)
    checkpoints.wait()
    restored = checkpoints.saved.restore(new.state)
    same(restored, state._replace(recent=new.init().recent))
    checkpoints.close()


def test_another_mesh_restores_to_its_own_layout(programs, folder):
    """From data 2 x fsdp 2 x tensor 2 to fsdp 8: every leaf where the table says."""
    old = programs("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", devices=8)
    new = programs("mesh.fsdp=8", devices=8)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.device_put(
            jnp.asarray(rng.normal(size=x.shape), x.dtype), x.sharding
        ),
        old.state,
    )
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(4, state, ABOUT)
    checkpoints.wait()
    restored = checkpoints.saved.restore(new.state)
    checkpoints.close()
    same(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == new.shardings
    assert new.shardings == state_shardings(
        new.state, new.infos, new.mesh, new.config.mesh.params
    )
    head = restored.params["head"]["weight"]
    assert head.addressable_shards[0].data.shape == (4, 384)


def test_the_latest_are_kept_and_every_so_many(saved, folder):
    checkpoints = saved(*range(1, 12), keep_latest=2, keep_every_steps=4)
    assert checkpoints.saved.steps() == [4, 8, 10, 11]
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
    assert sorted(steps) == [4, 8, 10, 11]


def test_a_step_is_saved_once(saved):
    checkpoints = saved(1)
    checkpoints.save(1, make_state(5), ABOUT)
    same(checkpoints.saved.restore(like()), make_state(1))


def files_of(step: Path) -> list[Path]:
    return sorted(p for p in step.rglob("*") if p.is_file())


def arrays_of(step: Path) -> Path:
    return max(files_of(step), key=lambda p: p.stat().st_size)


def truncate(step: Path) -> None:
    for file in files_of(step):
        os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(step: Path) -> None:
    data = bytearray(arrays_of(step).read_bytes())
    data[len(data) // 2] ^= 16
    arrays_of(step).write_bytes(bytes(data))


HARMS = {
    "flipped": flip_a_bit,
    "no metadata": lambda step: [p.unlink() for p in step.rglob("*METADATA*")],
    "no seal": lambda step: (step / SEAL).unlink(),
    "one file more": lambda step: (step / "state" / "more").write_text("not of it"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_one_is_set_aside_loudly_and_the_one_before_taken(
    saved, folder, caplog, harm
):
    checkpoints = saved(1, 2)
    harm(Path(folder) / "2")
    same(checkpoints.saved.restore(like()), make_state(1))
    assert checkpoints.saved.steps() == [1]
    (aside,) = (folder / "quarantine").iterdir()
    assert aside.name.startswith("2-")
    assert files_of(Path(aside))
    messages = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert any("checkpoint of step 2 is damaged" in m for m in messages)
    assert any(f"set aside as {aside}" in m for m in messages)
    checkpoints.save(2, make_state(7), ABOUT)  # the run comes here again
    checkpoints.wait()
    same(checkpoints.saved.restore(like()), make_state(7))


def test_if_all_are_damaged_that_is_an_error_now_and_later(saved, folder):
    """Never a fresh start: not even at the next attempt, with all set aside."""
    checkpoints = saved(1, 2)
    truncate(Path(folder) / "1")
    truncate(Path(folder) / "2")
    with pytest.raises(DataError, match="not starting over"):
        checkpoints.saved.restore(like())
    assert len(list((folder / "quarantine").iterdir())) == 2
    checkpoints.close()
    again = saved()
    with pytest.raises(DataError, match="quarantine"):
        again.saved.restore(like())


def test_no_flip_and_no_cut_goes_unnoticed(saved, folder):
    """Each is found, or leaves every bit of what is restored as it was."""
    checkpoints = saved(1)
    step, rng = folder / "1", np.random.default_rng(0)
    files = files_of(Path(step))
    for trial in range(300):
        file = files[int(rng.integers(len(files)))]
        content = file.read_bytes()
        if not content:
            continue
        at = int(rng.integers(len(content)))
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(content[:at] if trial % 3 == 0 else damaged)
        if damage(step) is None:
            assert file.name == SEAL, file  # say, a space of the JSON
            same(checkpoints.saved.restore(like()), make_state(1))
        file.write_bytes(content)
    assert damage(step) is None


def test_parts_of_the_files_are_checked_by_several(saved, folder):
    saved(1)
    flip_a_bit(Path(folder) / "1")
    found = [damage(folder / "1", part, 3) for part in range(3)]
    assert sum(wrong is not None for wrong in found) == 1


def unsealed(checkpoints, step, attempt, written) -> None:
    written.result()


def test_what_died_before_its_seal_is_taken_for_want_of_another(
    saved, folder, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", unsealed)
        saved(1)
    assert not is_sealed(folder / "1")
    same(saved().saved.restore(like()), make_state(1))
    assert "taken unverified" in caplog.text
    assert damage(folder / "1") is None
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", unsealed)
        saved(2)
    again = saved()
    same(again.saved.restore(like()), make_state(1))
    assert again.saved.steps() == [1]
    (aside,) = (folder / "quarantine").iterdir()
    assert aside.name.startswith("2-")
    again.save(2, make_state(7), ABOUT)  # the run comes here again
    again.wait()
    assert damage(folder / "2") is None
    same(saved().saved.restore(like()), make_state(7))


def full(step, part=0, parts=1):
    raise OSError(28, "No space left on device")


def test_the_last_save_that_fails_is_told(saved, monkeypatch):
    monkeypatch.setattr("train.run.checkpoint.digests", full)
    with pytest.raises(Exit, match=r"step 1, failed: OSError.*No space left"):
        saved(1)


def test_a_failed_save_costs_a_warning_until_there_are_too_many(
    saved, folder, monkeypatch
):
    checkpoints = saved(1, max_failed_saves=2)
    partial = folder / "2.orbax-checkpoint-tmp"
    with monkeypatch.context() as patch:
        patch.setattr("train.run.checkpoint.digests", full)
        assert checkpoints.save(2, make_state(2), ABOUT) is None  # not known yet
        wait([checkpoints._saving[1]])
        partial.mkdir()
    assert "step 2 failed" in checkpoints.save(3, make_state(3), ABOUT)
    assert not partial.exists()
    assert checkpoints.save(4, make_state(4), ABOUT) is None
    assert checkpoints.failures == 0  # one that succeeds forgives
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr("train.run.checkpoint.digests", full)
        assert checkpoints.save(5, make_state(5), ABOUT) is None
        assert "step 5 failed" in checkpoints.save(6, make_state(6), ABOUT)
        assert "step 6 failed" in checkpoints.save(7, make_state(7), ABOUT)
        with pytest.raises(Exit, match=r"3 saves in a row failed, above .*=2"):
            checkpoints.save(8, make_state(8), ABOUT)
    same(saved().saved.restore(like()), make_state(4))


def test_marks_that_a_kill_left_are_removed_at_the_next_start(saved, folder):
    """Behind the seal of step 1, and before anything of step 2 was written."""
    saved(1)
    for step in ("1", "2"):
        (folder / "unsealed" / step).write_text("")
    same(SavedSteps(folder).restore(like()), make_state(1))
    assert len([*(folder / "unsealed").iterdir()]) == 2  # a command changes nothing
    same(saved().saved.restore(like()), make_state(1))
    assert [*(folder / "unsealed").iterdir()] == []


def test_a_full_disk_is_seen_beforehand(saved, folder, monkeypatch):
    checkpoints = saved(1)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage._replace(free=7))
        said = checkpoints.save(2, make_state(2), ABOUT)
    assert "step 2 was not saved: 7 bytes are free" in said
    assert not (folder / "unsealed" / "2").exists()
    assert checkpoints.save(3, make_state(3), ABOUT) is None
    checkpoints.wait()
    assert checkpoints.saved.steps() == [1, 3]


def test_a_save_makes_way_for_one_that_is_not_through(saved, monkeypatch):
    checkpoints, go = saved(1), threading.Event()
    monkeypatch.setattr("train.run.checkpoint._GRACE_S", 0.1)
    seal = Checkpoints._seal
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", lambda *a: (go.wait(60), seal(*a))[1])
        assert checkpoints.save(2, make_state(2), ABOUT) is None
        assert "not through yet" in checkpoints.save(3, make_state(3), ABOUT)
        go.set()
        assert checkpoints.save(4, make_state(4), ABOUT, last=True) is None
    checkpoints.wait()
    assert checkpoints.saved.steps() == [2, 4]


def test_training_leaves_storage_behind_that_does_not_answer(
    saved, folder, monkeypatch
):
    checkpoints, go = saved(1), threading.Event()
    monkeypatch.setattr("train.run.checkpoint._GRACE_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_before_save", lambda: go.wait(60))
        for step in (2, 3):
            said = checkpoints.save(step, make_state(step), ABOUT)
            assert f"step {step} was not saved: the storage has not answered" in said
            assert "since step 2" in said
    assert checkpoints.failures == 2
    go.set()
    assert checkpoints.save(4, make_state(4), ABOUT, last=True) is None
    checkpoints.wait()
    assert checkpoints.saved.steps() == [1, 4]
    assert [*(folder / "unsealed").iterdir()] == []


def test_rewinding_sets_aside_what_is_later(saved, folder):
    checkpoints = saved(1, 3, 5, keep_latest=3)
    with pytest.raises(ConfigError, match=r"run\.rewind_to.*\n.*\[1, 3, 5\]"):
        checkpoints.saved.restore(like(), at_most=0)
    same(checkpoints.saved.restore(like(), at_most=4), make_state(3))
    assert checkpoints.saved.steps() == [1, 3]
    assert [p.name[:2] for p in (folder / "quarantine").iterdir()] == ["5-"]
    checkpoints.save(5, make_state(9), ABOUT)
    checkpoints.wait()
    same(saved().saved.restore(like()), make_state(9))


def test_a_state_that_does_not_fit_sets_nothing_aside(saved, folder):
    checkpoints = saved(1)
    with pytest.raises(Exception, match=r"[Ss]hape") as error:
        checkpoints.saved.restore(like(32))
    assert "what was written: it does not fit" in error.value.__notes__[0]
    assert checkpoints.saved.steps() == [1]
    assert not (folder / "quarantine").exists()


def test_a_command_on_a_run_moves_nothing(saved, folder):
    saved(1, 2)
    truncate(Path(folder) / "2")
    reader = SavedSteps(folder)
    before = sorted(Path(folder).rglob("*"))
    step, params = reader.restore_params(like())
    assert step == 1
    same(params, make_state(1).params)
    assert sorted(Path(folder).rglob("*")) == before
    with pytest.raises(DataError):
        reader.restore_params(like(), 2)


def test_a_save_that_died_half_way_is_no_checkpoint(saved, folder):
    saved(1)
    (left,) = [folder / "2.orbax-checkpoint-tmp-1"]
    left.mkdir()
    (left / "half").write_text("of it")
    again = saved()
    assert again.saved.steps() == [1]
    same(again.saved.restore(like()), make_state(1))
    assert not left.exists()


def test_due_by_steps_and_by_minutes(folder, monkeypatch):
    config = CheckpointConfig(save_interval_steps=10, save_interval_minutes=5.0)
    now = [1000.0]
    monkeypatch.setattr("train.run.checkpoint.time.monotonic", lambda: now[0])
    checkpoints = Checkpoints(folder, config)
    assert [s for s in range(1, 31) if checkpoints.due(s)] == [10, 20, 30]
    now[0] += 5 * 60
    assert not checkpoints.due(11)
    assert checkpoints.overdue()
    assert not checkpoints.overdue()  # all processes have been asked by now
    checkpoints.save(11, make_state(11), ABOUT)
    assert not checkpoints.overdue()
    now[0] += 5 * 60
    assert checkpoints.overdue()
    checkpoints.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_over_many_saves(folder):
    """Some Orbax versions kept what they had written."""
    checkpoints = Checkpoints(folder, CheckpointConfig())
    state = make_state(0, size=2**14)  # 1.5 MiB
    sizes = {}
    for step in range(1, 201):
        checkpoints.save(step, state, ABOUT)
        checkpoints.wait()
        if step in (60, 200):
            gc.collect()
            sizes[step] = resident_bytes()
    checkpoints.close()
    # 140 saves of 1.5 MiB: keeping even a tenth of them would show.
    assert sizes[200] - sizes[60] < 20 * 2**20


def test_the_command_lists_and_checks(saved, folder, capsys):
    """A run's checkpoints from outside: which are what was written."""
    saved(1, 2)
    asked = CheckpointsConfig(RunConfig(dir=str(folder.parent)))
    assert main(asked) == 0
    assert capsys.readouterr().out.count("verified") == 2
    flip_a_bit(Path(folder) / "2")
    assert main(replace(asked, verify=False)) == 0
    assert capsys.readouterr().out.count("sealed") == 2
    assert main(asked) == 65
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "DAMAGED" in line] == ["2"]
