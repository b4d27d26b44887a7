"""Damaged and incomplete checkpoints are detected and set aside."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from tests.train.run.conftest import ABOUT
from tests.train.run.states import like, make_state, same
from train.checkpoints import CheckpointsConfig, main
from train.config import RunConfig
from train.errors import ConfigError
from train.run.checkpoint import Checkpoints
from train.run.digests import SEAL, copy_step, find_damage, is_sealed
from train.run.restore import SavedSteps


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
def test_a_damaged_step_is_set_aside_loudly_and_the_previous_one_restored(
    saved, folder, caplog, harm
):
    checkpoints = saved(1, 2)
    harm(Path(folder) / "2")
    same(checkpoints.saved.restore(like()), make_state(1))
    assert checkpoints.saved.steps() == [1]
    (quarantined_step,) = (folder / "quarantine").iterdir()
    assert quarantined_step.name.startswith("2-")
    assert files_of(Path(quarantined_step))
    messages = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert any("checkpoint of step 2 is damaged" in m for m in messages)
    assert any(f"set aside as {quarantined_step}" in m for m in messages)
    checkpoints.save(2, make_state(2, seed=7), ABOUT)  # the run is again at step 2
    checkpoints.wait()
    same(checkpoints.saved.restore(like()), make_state(2, seed=7))


def test_if_all_steps_are_damaged_every_start_fails(saved, folder):
    """The run never starts over, even at the next attempt when all are set aside."""
    checkpoints = saved(1, 2)
    truncate(Path(folder) / "1")
    truncate(Path(folder) / "2")
    with pytest.raises(DataError, match="does not start over"):
        checkpoints.saved.restore(like())
    assert len(list((folder / "quarantine").iterdir())) == 2
    checkpoints.close()
    next_start = saved()
    with pytest.raises(DataError, match="quarantine"):
        next_start.saved.restore(like())


def test_no_flipped_bit_and_no_truncation_goes_unnoticed(saved, folder):
    """Each change is detected, or the restored state equals the saved one bitwise."""
    checkpoints = saved(1)
    step = folder / "1"
    rng = np.random.default_rng(0)
    files = files_of(Path(step))
    for trial in range(300):
        file = files[int(rng.integers(len(files)))]
        content = file.read_bytes()
        if not content:
            continue
        offset = int(rng.integers(len(content)))
        damaged = bytearray(content)
        damaged[offset] ^= 1 << int(rng.integers(8))
        file.write_bytes(content[:offset] if trial % 3 == 0 else damaged)
        if find_damage(step) is None:
            assert file.name == SEAL, file  # it may be a space in its JSON
            same(checkpoints.saved.restore(like()), make_state(1))
        file.write_bytes(content)
    assert find_damage(step) is None


def test_a_step_under_another_number_is_not_restored(saved, folder, caplog):
    """Otherwise, step 2 would continue as step 5, and step 5 would never be saved."""
    saved(1, 2)
    (folder / "2").rename(folder / "5")
    checkpoints = saved()
    same(checkpoints.saved.restore(like()), make_state(1))
    assert checkpoints.saved.steps() == [1]
    assert "it holds step 2. Give its folder that name" in caplog.text
    (quarantined_step,) = (folder / "quarantine").iterdir()
    assert quarantined_step.name.startswith("5-")
    (folder / "1").rmtree()
    quarantined_step.rename(folder / "2")
    same(saved().saved.restore(like()), make_state(2))


def test_the_arrays_of_another_step_are_not_restored(saved, folder, caplog):
    """The checkpoint claims to be of step 5, but its arrays are from step 2."""
    checkpoints = saved(1)
    checkpoints.save(5, make_state(2), ABOUT)
    checkpoints.wait()
    same(checkpoints.saved.restore(like()), make_state(1))
    assert "its arrays are from another step" in caplog.text
    assert [p.name[:2] for p in (folder / "quarantine").iterdir()] == ["5-"]


def test_a_step_of_another_run_is_not_restored(saved, folder, caplog):
    saved(1, run_id="this")
    saved(2, path=folder / "of" / "another", run_id="that")
    (folder / "of" / "another" / "2").rename(folder / "2")
    reader = SavedSteps(folder, run_id="this")  # a command reads and moves nothing
    assert reader.restore_params(like())[0] == 1
    checkpoints = saved(run_id="this")
    same(checkpoints.saved.restore(like()), make_state(1))
    assert "checkpoint of step 2 does not belong there" in caplog.text
    assert "it was saved by another run" in caplog.text
    assert [p.name[:2] for p in (folder / "quarantine").iterdir()] == ["2-"]


def test_a_run_does_not_restore_a_step_that_names_no_run(saved):
    """A reader that names no run restores any step."""
    saved(2, run_id="this")
    same(saved().saved.restore(like()), make_state(2))
    saved(3)
    same(saved(run_id="this").saved.restore(like()), make_state(2))


def test_a_pipe_in_place_of_a_file_is_damage_and_blocks_nothing(saved, folder):
    saved(1)
    for file in files_of(Path(folder) / "1"):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        assert "is not a regular file" in (find_damage(folder / "1") or "")
        if "CHECKPOINT" in file.name:  # Orbax reads it when it opens the folder
            with pytest.raises(DataError, match=r"/1: .* Move this folder elsewhere"):
                SavedSteps(folder)
        file.unlink()
        file.write_bytes(content)
    assert find_damage(folder / "1") is None


def wait_without_sealing(checkpoints, step, attempt, written) -> None:
    written.result()


def test_an_unsealed_step_is_restored_only_if_there_is_no_other(
    saved, folder, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", wait_without_sealing)
        saved(1)
    assert not is_sealed(folder / "1")
    same(saved().saved.restore(like()), make_state(1))
    assert "used unverified" in caplog.text
    assert find_damage(folder / "1") is None
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", wait_without_sealing)
        saved(2)
    next_start = saved()
    same(next_start.saved.restore(like()), make_state(1))
    assert next_start.saved.steps() == [1]
    (quarantined_step,) = (folder / "quarantine").iterdir()
    assert quarantined_step.name.startswith("2-")
    next_start.save(2, make_state(2, seed=7), ABOUT)  # the run is again at step 2
    next_start.wait()
    assert find_damage(folder / "2") is None
    same(saved().saved.restore(like()), make_state(2, seed=7))


def test_marks_that_a_kill_left_are_removed_at_the_next_start(saved, folder):
    """The kills came after the seal of step 1 and before the first file of step 2."""
    saved(1)
    for step in ("1", "2"):
        (folder / "unsealed" / step).write_text("")
    same(SavedSteps(folder).restore(like()), make_state(1))
    assert len([*(folder / "unsealed").iterdir()]) == 2  # a command changes nothing
    same(saved().saved.restore(like()), make_state(1))
    assert [*(folder / "unsealed").iterdir()] == []


def test_a_step_that_does_not_exist_is_refused(saved):
    reader = saved(1, 2).saved
    with pytest.raises(ConfigError, match=r"must be a saved step.*: 1, 2"):
        reader.restore(like(), step=3)


def test_a_command_on_a_run_moves_nothing(saved, folder):
    saved(1, 2)
    truncate(Path(folder) / "2")
    reader = SavedSteps(folder)
    paths = sorted(Path(folder).rglob("*"))
    step, params = reader.restore_params(like())
    assert step == 1
    same(params, make_state(1).params)
    assert sorted(Path(folder).rglob("*")) == paths
    with pytest.raises(DataError):
        reader.restore_params(like(), 2)


@pytest.fixture
def asked(folder) -> CheckpointsConfig:
    """Return the config of the command that lists the checkpoints of a run."""
    (folder.parent / "config.yaml").write_text(ABOUT["config"])
    return CheckpointsConfig(RunConfig(dir=str(folder.parent)))


def test_the_command_lists_and_verifies_checkpoints(saved, folder, asked, capsys):
    """The command shows which checkpoints of a run are as they were written."""
    saved(1, 2)
    assert main(asked) == 0
    assert capsys.readouterr().out.count("verified") == 2
    flip_a_bit(Path(folder) / "2")
    assert main(replace(asked, verify=False)) == 0
    assert capsys.readouterr().out.count("sealed") == 2
    assert main(asked) == 65
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "DAMAGED" in line] == ["2"]
    (folder / "2").rmtree()
    (folder / "1").rename(folder / "3")
    assert main(asked) == 65
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "MISPLACED" in line] == ["3"]


@pytest.mark.parametrize("name", ["precious", "../precious", "state/../../precious"])
def test_a_name_in_a_seal_leads_to_no_other_file(saved, folder, tmp_path, name):
    """An absolute name, or one with .., is neither read nor written."""
    saved(1)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    name = str(precious) if name == "precious" else name
    seal = json.loads((folder / "1" / SEAL).read_text())
    (folder / "1" / SEAL).write_text(json.dumps({**seal, name: [8, "a"]}))
    assert "is not the name of a file" in (find_damage(folder / "1") or "")
    with pytest.raises(ValueError, match="is not the name of a file"):
        copy_step(folder / "1", folder.parent / "copy", {}, lambda: None)
    assert precious.read_text() == "precious"
    assert not (folder.parent / "copy").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "3", '{"a": NaN', ""])
def test_a_seal_that_is_not_a_json_object_is_damage(saved, folder, content):
    checkpoints = saved(1, 2)
    (folder / "2" / SEAL).write_text(content)
    same(checkpoints.saved.restore(like()), make_state(1))


@pytest.mark.parametrize("name", ["unsealed", "quarantine", "2"])
@pytest.mark.parametrize("kind", ["link", "file", "pipe", "link to nothing"])
def test_no_link_is_followed_where_a_start_deletes(saved, folder, tmp_path, name, kind):
    saved(1)
    target = tmp_path / "other"
    path = Path(folder / name)
    target.mkdir()
    (target / "7").write_text("precious")
    (folder / "unsealed").rmtree(missing_ok=True)
    if kind.startswith("link"):
        path.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    elif kind == "file":
        path.write_text("")
    else:
        os.mkfifo(path)
    with pytest.raises(DataError, match=f"/{name}: must be a folder, and not a link"):
        saved()
    assert (target / "7").read_text() == "precious"
