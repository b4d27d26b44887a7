"""An export has the same bytes from any mesh and number of processes."""

import pytest

from data.program import PREFIX
from tests.fleet import TINY, Fleet, of_text, write_text

EIGHT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.mark.slow
def test_the_bytes_are_the_same_from_one_device_eight_and_two_processes(tmp_path):
    """The model has experts; one file holds its weights."""
    overrides = [
        *("model=mixtral_nano", *TINY, *of_text(write_text(tmp_path))),
        *(f"run.dir={tmp_path}/run", *EIGHT, "data.batch_size=8"),
        *("runtime.cpu_devices=8", "train.num_steps=2"),
    ]
    assert Fleet(tmp_path / "train", overrides, 1).wait() == [0]
    folders = []
    for devices, count in ((1, 1), (8, 1), (4, 2)):
        folder = tmp_path / f"{devices}-{count}"
        overrides = [f"run.dir={tmp_path}/run", f"output={folder}"]
        overrides.append(f"runtime.cpu_devices={devices}")
        fleet = Fleet(
            tmp_path / f"said-{count}", overrides, count, module=f"{PREFIX}train.export"
        )
        assert fleet.wait() == [0] * count, fleet.said() + fleet.said(count - 1)
        assert "exported" in fleet.said()
        folders.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert "model.safetensors" in folders[0]
    assert folders[0] == folders[1] == folders[2]
