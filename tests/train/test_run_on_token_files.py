"""A run on token files of other trainers is the run on a store of the same tokens."""

import signal
from pathlib import Path

import pytest

from tests.data.token_files.writers import (
    WRITERS,
    documents,
    tokens_of,
    write_store_of,
)
from tests.drills.run import Run
from tests.fleet import TINY

TEXTS = documents(1500)


def run_on(folder: Path, source: str, path: Path, count: int) -> Run:
    """Name a run on two devices that lie in `count` processes."""
    overrides = [
        *(word for word in TINY if word != "data=text"),
        *(f"data={source}", f"data.path={path}", f"data.cache_dir={folder}/cache"),
        *("data.tokenizer=bytes", "data.validation=0.2", "data.packing=best_fit"),
        *(f"runtime.cpu_devices={2 // count}", "mesh.fsdp=2"),
        "runtime.allow_fault_injection=true",
    ]
    if source == "tokens":
        overrides.remove("data.tokenizer=bytes")
        overrides.remove("data.validation=0.2")
    return Run(folder / f"{source}-{path.stem}-{count}", overrides, {})


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_losses_are_those_of_a_store_after_a_kill(tmp_path, count):
    web = tmp_path / "web.bin"
    store = run_on(tmp_path, "tokens", write_store_of(web, TEXTS), count)
    store.finish(count=count)
    losses = store.losses()
    assert len(losses) == 20
    for number, (source, write) in enumerate(WRITERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(folder / web.name, tokens_of(TEXTS))
        run = run_on(folder, source, path, count)
        fleet = run.start(count=count)
        fleet.await_that(lambda run=run: run.step >= 7)
        fleet.send(signal.SIGKILL)
        assert set(fleet.wait()) <= {137, 134}
        run.finish(count=count)
        assert len(run.events("start")) == 2
        assert run.losses() == losses
