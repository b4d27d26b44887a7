"""Drills of starts that differ from the last one in mesh, processes or config."""

import hashlib
import json
import shutil
import signal
from pathlib import Path

from tests.drills.drill import drill, expect
from tests.drills.ground import Ground
from tests.drills.preemption import after_steps
from tests.fleet import Fleet

GOLDEN = Path(__file__).parent / "golden"


@drill(23, promise="other mesh")
def mesh_changed(ground: Ground) -> str:
    """A run on one device continues on fsdp=2 from step 20, and on data=2 x tensor=2
    from step 30 -> the losses equal those of one device to 1e-5 in float32."""
    run = ground.half()
    run.finish("mesh.fsdp=2", "runtime.cpu_devices=2", "train.num_steps=30")
    run.finish("mesh.data=2", "mesh.fsdp=1", "mesh.tensor=2", "runtime.cpu_devices=4")
    ground.check(run, rel=1e-5)
    return "losses equal to 1e-5"


@drill(24)
def processes_changed(ground: Ground) -> str:
    """A run of two processes continues with one from step 20, and with four from step
    30 -> each example is read once, in the batches of one process: the losses are equal
    to 1e-5 in float32."""
    run = ground.half(2)
    run.finish("train.num_steps=30")
    run.finish(count=4)
    ground.check(run, rel=1e-5)
    return "losses equal to 1e-5"


@drill(25)
def another_model_batch_dtype_and_tokenizer(ground: Ground) -> str:
    """Width, batch, parameter dtype and tokenizer are changed at once -> the start
    exits with 78, names each key with both values, and changes no file of the run; with
    the old config the run continues."""
    run = ground.half()
    ranks = ground.place / "ranks.tiktoken"
    words = (f"input={ground.text}", f"output={ranks}", "vocab_size=300")
    expect("exit codes", run.other("data.train_tokenizer", *words).wait(), [0])
    content = _content(run.path)
    digest = hashlib.sha256(ranks.read_bytes()).hexdigest()
    changes = {
        "model.embed_dim": ("64", "32"),
        "model.param_dtype": ("bfloat16", "float32"),
        "data.batch_size": ("16", "8"),
        "data.tokenizer": (str(ranks), "bytes"),
        "data.tokenizer_sha256": (digest, "None"),
    }
    fleet = run.start(*(f"{key}={new}" for key, (new, _) in changes.items()))
    expect("exit codes", fleet.wait(), [78])
    output = fleet.said()
    for key, (new, old) in changes.items():
        assert f"{key} = {new}" in output, output
        assert f"which has {old}" in output.split(f"{key} = ")[1][:400], output
    expect("files of the run", _content(run.path), content)
    run.finish()
    ground.check(run)
    return f"78, {len(changes)} keys with both values; then bits equal"


def _content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@drill(28)
def checkpoint_of_an_older_version(ground: Ground) -> str:
    """An older version of this program made the run of 10 steps in tests/drills/golden,
    and this version continues it -> the losses equal those of the older version to 1e-5
    in float32."""
    for name in ("run", "text.txt"):
        copy = shutil.copytree if name == "run" else shutil.copy
        copy(GOLDEN / name, ground.place / name)
    overrides = (GOLDEN / "overrides.txt").read_text().split()
    # Paths are relative, so that the run can be anywhere.
    fleet = Fleet(ground.place, overrides, environment=ground.environment)
    expect("exit codes", fleet.wait(), [0])
    assert "from step 10\n" in fleet.said(), fleet.said()
    run = ground.run()
    expected = json.loads((GOLDEN / "losses.json").read_text())
    for step, loss in enumerate(expected, 1):
        error = abs(run.losses()[step] / loss - 1)
        assert error < 1e-5, f"loss of step {step}: off by {error:.1e}"
    return f"from step 10, {len(expected)} losses equal to 1e-5"


@drill(31)
def ten_restarts(ground: Ground) -> str:
    """A run with a tracker is started ten times, and ended by SIGKILL and SIGTERM in
    turns -> the tracker has one id, metrics.jsonl has each step once, and the bits are
    the same."""
    run = ground.run("tracker=wandb", "checkpoint.save_interval_steps=2")
    for number in range(10):
        fleet = run.start()
        after_steps(run, fleet, 3)
        fleet.send(signal.SIGTERM if number % 2 else signal.SIGKILL)
        expect("exit codes", fleet.wait(), [42 if number % 2 else 137])
    run.finish()
    ground.check(run)
    ids = {
        p.name.rpartition("-")[2] for p in run.path.glob("wandb/wandb/offline-run-*")
    }
    ids |= {p.name.rpartition("-")[2] for p in run.path.glob("wandb/offline-run-*")}
    expect("tracker ids", ids, {(run.path / "wandb/run_id").read_text().strip()})
    return "one id, each step once, bits equal"
