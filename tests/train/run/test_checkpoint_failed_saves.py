"""Training continues after saves that fail or are late, up to a limit, and warns."""

import shutil
import threading
from concurrent.futures import wait

import pytest

from tests.train.run.conftest import ABOUT
from tests.train.run.states import like, make_state, same
from train.errors import Exit
from train.run import checkpoint
from train.run.checkpoint import Checkpoints
from train.run.digests import is_sealed


def full(step, part=0, parts=1):
    raise OSError(28, "No space left on device")


def test_a_failed_save_costs_a_warning_until_there_are_too_many(
    saved, folder, monkeypatch
):
    checkpoints = saved(1, max_failed_saves=2)
    partial = folder / "2.orbax-checkpoint-tmp"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "digests", full)
        # The failure is not known yet.
        assert checkpoints.save(2, make_state(2), ABOUT) is None
        wait([checkpoints._saving[1]])
        partial.mkdir()
    assert "step 2 failed" in checkpoints.save(3, make_state(3), ABOUT)
    assert not partial.exists()
    assert checkpoints.save(4, make_state(4), ABOUT) is None
    assert checkpoints.failures == 0  # a successful save resets the count
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "digests", full)
        assert checkpoints.save(5, make_state(5), ABOUT) is None
        assert "step 5 failed" in checkpoints.save(6, make_state(6), ABOUT)
        assert "step 6 failed" in checkpoints.save(7, make_state(7), ABOUT)
        with pytest.raises(Exit, match=r"3 saves in a row failed, above .*=2"):
            checkpoints.save(8, make_state(8), ABOUT)
    same(saved().saved.restore(like()), make_state(4))


def test_a_step_without_its_seal_stays_if_it_is_the_only_one(
    saved, folder, monkeypatch
):
    """It has replaced the only other step, and no later save can replace it."""
    checkpoints = saved(1, keep_latest=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "digests", full)
        assert checkpoints.save(2, make_state(2), ABOUT) is None
        wait([checkpoints._saving[1]])
    assert not (folder / "1").exists()
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage("/")._replace(free=7)
        patch.setattr("shutil.disk_usage", lambda path: usage)
        assert "7 bytes are free" in checkpoints.save(3, make_state(3), ABOUT)
    same(saved().saved.restore(like()), make_state(2))


def test_a_full_disk_is_noticed_before_a_save(saved, folder, monkeypatch):
    checkpoints = saved(1)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage._replace(free=7))
        message = checkpoints.save(2, make_state(2), ABOUT)
    assert "step 2 was not saved: 7 bytes are free" in message
    assert not (folder / "unsealed" / "2").exists()
    assert checkpoints.save(3, make_state(3), ABOUT) is None
    checkpoints.wait()
    assert checkpoints.saved.steps() == [1, 3]


def test_a_save_is_skipped_while_another_is_running(saved, monkeypatch):
    checkpoints = saved(1)
    release = threading.Event()
    monkeypatch.setattr(checkpoint, "_GRACE_S", 0.1)
    seal = Checkpoints._seal
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", lambda *a: (release.wait(60), seal(*a))[1])
        assert checkpoints.save(2, make_state(2), ABOUT) is None
        assert "still running" in checkpoints.save(3, make_state(3), ABOUT)
        release.set()
        assert checkpoints.save(4, make_state(4), ABOUT, last=True) is None
    checkpoints.wait()
    assert checkpoints.saved.steps() == [2, 4]


def test_training_continues_when_the_storage_does_not_answer(
    saved, folder, monkeypatch
):
    checkpoints = saved(1)
    release = threading.Event()
    monkeypatch.setattr(checkpoint, "_GRACE_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_before_save", lambda: release.wait(60))
        for step in (2, 3):
            message = checkpoints.save(step, make_state(step), ABOUT)
            assert f"step {step} was not saved: the storage has not answered" in message
            assert "since step 2" in message
    assert checkpoints.failures == 2
    release.set()
    assert checkpoints.save(4, make_state(4), ABOUT, last=True) is None
    checkpoints.wait()
    assert checkpoints.saved.steps() == [1, 4]
    assert [*(folder / "unsealed").iterdir()] == []


def test_a_crash_waits_for_the_save_in_flight_unless_saves_fail(
    saved, folder, monkeypatch
):
    checkpoints = saved(1)
    release = threading.Event()
    seal = Checkpoints._seal
    monkeypatch.setattr(
        Checkpoints, "_seal", lambda *a: (release.wait(60), seal(*a))[1]
    )
    assert checkpoints.save(2, make_state(2), ABOUT) is None
    checkpoints.failures = 1
    checkpoints.finish(240)  # it returns at once
    assert not is_sealed(folder / "2")
    checkpoints.failures = 0
    threading.Timer(0.2, release.set).start()
    checkpoints.finish(240)
    assert is_sealed(folder / "2")
