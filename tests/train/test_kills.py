"""A run killed at random moments sees the rows that it would have seen anyway."""

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from data.batches import Order
from data.catalog import text_store
from data.sources import open_sources
from tests.fleet import TINY, Fleet, of_text, write_text
from tests.program import program_code
from tests.train.conftest import Configure
from train.run.metrics import read_metrics

# This is `python -m train`, which also records the tokens on the devices of a process.
RECORDING = """
import json
import os
import jax
import numpy as np
from train.__main__ import main
from train.cli.command import Command, run_command
from train.core.feed import Feed
from train.run.directory import RunDir

start_at, next_batch, steps = RunDir.start_at, Feed.__next__, []

def start_and_note(run, step):
    steps.append(step)
    start_at(run, step)

def next_and_record(feed):
    batch = next_batch(feed)
    parts = {
        shard.index[0].start or 0: np.asarray(shard.data).tolist()
        for shard in batch.inputs.addressable_shards
    }
    file = f"{os.environ['RECORD']}.{jax.process_index()}.jsonl"
    with open(file, "a") as lines:
        lines.write(json.dumps({"step": steps[-1], "parts": parts}) + "\\n")
    steps.append(steps[-1] + 1)
    return batch

RunDir.start_at, Feed.__next__ = start_and_note, next_and_record

if __name__ == "__main__":
    run_command(Command(main))
"""
STEPS = 60
GROWING = (
    "data.batch_schedule=[{from_step: 9, rows: 12}, {from_tokens: 6000, rows: 16}]",
    "data.sequence_schedule=[{from_step: 0, length: 16}, {from_step: 6, length: 32}]",
    *(f"train.num_steps={STEPS}", "checkpoint.save_interval_steps=4"),
    *("checkpoint.keep_latest=2", "runtime.allow_fault_injection=true"),
)


def newest_save(run: Path) -> int:
    """Return the newest step whose checkpoint is complete and sealed; 0 without one."""
    seals = run.glob("checkpoints/*/digests.json")
    return max((int(seal.parent.name) for seal in seals), default=0)


def rows_of(folder: Path, start: int) -> dict[int, np.ndarray]:
    """Return the tokens [rows, length] of each step that all processes recorded."""
    parts: dict[int, list[dict[str, list]]] = {}
    files = list(folder.glob(f"{start}.*.jsonl"))
    for file in files:
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a kill may tear the last line
                record = json.loads(line)
                parts.setdefault(record["step"], []).append(record["parts"])
    rows = {}
    for step, parts_of_processes in parts.items():
        if len(parts_of_processes) == len(files):
            by_row = {int(k): v for part in parts_of_processes for k, v in part.items()}
            rows[step] = np.concatenate([by_row[first] for first in sorted(by_row)])
    return rows


@pytest.mark.slow
def test_rows_of_growing_batches_are_a_prefix_after_kills_on_other_meshes(
    tmp_path: Path, configure: Configure
):
    """Each start has another number of processes or devices, or another mesh."""
    write_text(tmp_path)
    (tmp_path / "recording.py").write_text(program_code(RECORDING))
    run = tmp_path / "run"
    words = (*TINY, *of_text(tmp_path), *GROWING, f"run.dir={run}")
    starts = [
        (1, ("runtime.cpu_devices=2", "mesh.fsdp=2")),
        (2, ("runtime.cpu_devices=1", "mesh.data=2")),
        (1, ("runtime.cpu_devices=4", "mesh.fsdp=2", "mesh.data=2")),
        (2, ("runtime.cpu_devices=2", "mesh.fsdp=4")),
    ]
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    rows_by_step = dict[int, np.ndarray]()
    for number, (processes, mesh) in enumerate(starts):
        is_last = number == len(starts) - 1
        saved_step = newest_save(run)
        # A slow pace leaves time to kill; no one writes the file that would end it.
        pace = "" if is_last else "pace:0.15:never"
        environment = {"RECORD": str(number), "LONGHAUL_DRILL": pace}
        fleet = Fleet(
            tmp_path,
            (*words, *mesh),
            processes,
            module="recording",
            environment=environment,
        )
        if is_last:
            assert fleet.wait() == [0] * processes, fleet.said()
        else:
            fleet.await_that(lambda step=saved_step: newest_save(run) > step)
            time.sleep(moments.uniform(0, 1))
            fleet.send(signal.SIGKILL)
            assert set(fleet.wait()) == {137}, f"seed {seed}: {fleet.said()}"
        new_rows = rows_of(tmp_path, number)
        assert min(new_rows) >= saved_step, f"seed {seed}: it did not go on from a save"
        assert sorted(new_rows) == list(range(min(new_rows), max(new_rows) + 1))
        for step in new_rows.keys() & rows_by_step.keys():
            np.testing.assert_array_equal(new_rows[step], rows_by_step[step])
        rows_by_step |= new_rows

    assert [rows_by_step[step].shape for step in (0, 6, 9, STEPS - 1)] == [
        *((8, 16), (8, 32), (12, 32), (16, 32))
    ]
    tokens = np.concatenate([rows_by_step[step].ravel() for step in range(STEPS)])
    constant_config = configure(
        [
            *words,
            "data.batch_schedule=[]",
            "data.sequence_schedule=[]",
            "data.document_start=true",
        ]
    )
    order = Order(
        open_sources(constant_config.data, text_store),
        constant_config.data,
        constant_config.seed,
    )
    batches = [order.read(k).inputs.ravel() for k in range(-(-len(tokens) // 256))]
    np.testing.assert_array_equal(tokens, np.concatenate(batches)[: len(tokens)])
    rows = [row for row in read_metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["tokens"] == len(tokens)
