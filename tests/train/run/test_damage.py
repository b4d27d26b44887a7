"""Each command continues with a damaged file, or names the file and a remedy."""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from etils import epath

import train.profile.__main__ as profile
from data.errors import DataError
from launch.submissions import Submission, require_submission
from train import checkpoints, report, status
from train.cli.schema import config_yaml
from train.config import Config, RunConfig
from train.distributed.processes import Cluster
from train.errors import WRONG_CONFIG, WRONG_DATA, ConfigError, Exit, exit_code
from train.evaluate.results import score_lines
from train.liveness import Owner
from train.pretrained.begin import record_or_check_files
from train.profile import times as times_module
from train.run.directory import open_run
from train.run.evaluations import write_evaluation
from train.run.starts import check_data, read_results, read_run
from train.run.this_start import ThisStart

SOURCES = cast(Any, SimpleNamespace(fingerprints={"": "a"}, path="text"))
EVENTS = [
    {"start": 1, "event": "restore", "step": 0, "time": 10.0, "seconds": 1.0},
    {"start": 1, "event": "step", "step": 20, "steps": 20, "time": 20.0, "seconds": 9},
]
RESULTS = {"step": 20, "eval/loss": 2.0, "eval/bits_per_byte": 1.0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was killed at step 20, with every kind of file of a run."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    dead_owner = replace(Owner.current(), pid=2**30)
    metrics = [{"step": s, "loss": 2.0, "eval/loss": 2.0} for s in (10, 20)]
    (folder / "checkpoints" / "20").mkdir(parents=True)
    (folder / "weights").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "weights" / name).write_bytes(b"weights")
    start = "changes: {}\ndata_fingerprints: {'': a}\nschedule_steps: 100\n"
    profile_record = {"first": 5, "last": 6, "seconds": 1.0, "id": "a"}
    files = {
        "config.yaml": config_yaml(config_of(folder)),
        "starts/1.yaml": start,
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in metrics),
        "events.jsonl": "".join(json.dumps(row) + "\n" for row in EVENTS),
        "results.json": json.dumps(RESULTS),
        "lease.json": dead_owner.to_json().decode(),
        "profiles/5/profile.json": json.dumps(profile_record),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "profiles/5/step.hlo.gz").write_bytes(gzip.compress(b"HloModule a"))
    record_or_check_files(str(folder / "weights"), epath.Path(folder), Cluster())
    write_evaluation(epath.Path(folder), 20, {"tasks": ["a"]}, {"tasks/a/acc": 0.5})
    (folder / "launch" / "1").mkdir(parents=True)
    Submission(str(folder), 1, "local", "a", (), "/").with_handle()
    return folder


def config_of(folder: Path) -> Config:
    run_config = RunConfig(dir=str(folder), lease_interval_s=0.01, lease_timeout_s=0.05)
    return Config(run=run_config)


def start(folder: Path) -> None:
    leaving = cast(Any, SimpleNamespace(step=0, crashed=print))
    this_start = ThisStart(epath.Path(folder), config_of(folder), SOURCES)
    with open_run(this_start, Cluster(), leaving) as run:
        run.start_at(20)


def evaluate(folder: Path) -> None:
    read_run(str(folder))
    check_data(epath.Path(folder), SOURCES)


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "train": start,
    "evaluate": evaluate,
    "results": lambda run: score_lines(read_results(epath.Path(run))),
    "status": lambda run: status.main(
        status.StatusConfig(RunConfig(dir=str(run)), json=True)
    ),
    "report": lambda run: report.main(report.ReportConfig([str(run)])),
    "checkpoints": lambda run: checkpoints.main(
        checkpoints.CheckpointsConfig(RunConfig(dir=str(run)))
    ),
    "profile": lambda run: profile.main(
        profile.ProfileConfig(RunConfig(dir=str(run)), step=5)
    ),
    "init_from": lambda run: record_or_check_files(
        str(run / "weights"), epath.Path(run), Cluster()
    ),
    "launch": lambda run: require_submission(str(run)),
}
# Each file has commands that need it, and commands that can do without it.
FILES: dict[str, tuple[set[str], set[str]]] = {
    "config.yaml": ({"train", "evaluate"}, {"status", "report", "checkpoints"}),
    "starts/1.yaml": ({"train", "evaluate", "status"}, set()),
    "metrics.jsonl": (set(), {"train", "status", "report"}),
    "events.jsonl": (set(), {"train", "status", "report"}),
    "results.json": (set(), {"train", "status", "results"}),
    "lease.json": (set(), {"train", "status"}),
    "init_from.json": ({"init_from"}, set()),
    "profiles/5/profile.json": ({"profile"}, set()),
    "profiles/5/step.hlo.gz": ({"profile"}, set()),
    "evaluations/*.json": (set(), {"report"}),
    "launch/1/record.json": ({"launch"}, set()),
}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda old: b"",
    "torn": lambda old: old[: len(old) // 2].rstrip(b"\n"),
    "binary": lambda old: bytes(range(256)) * 8,
    "zeros": lambda old: bytes(len(old)),
    "a list": lambda old: b"[1, 2]\n",
    "other values": lambda old: b'{"step": "a", "changes": [1], "start": {}}\n',
    # The YAML parser takes seconds to refuse deeper nesting.
    "deep": lambda old: b"[" * (3_000 if old.startswith(b"{") else 400),
}

# Other things may be in the place of a file.
OTHERS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a link to itself": lambda file: file.symlink_to(file),
    "a pipe": os.mkfifo,
}


def outcome(command: str, run: Path) -> tuple[int, str]:
    """Return the exit code and the message of a command; other errors are raised."""
    try:
        COMMANDS[command](run)
    except (ConfigError, DataError, Exit) as error:
        return exit_code(error), str(error)
    return 0, ""


@contextmanager
def copied(source: Path, folder: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Yield a copy of a run, and one of its files."""
    run = folder / "run"
    shutil.copytree(source, run)
    (file,) = run.glob(name)
    yield run, file
    shutil.rmtree(run)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no trace, which is a file of another program, and do not wait for beats."""
    times = {("layers", "product"): 1.0}, "one device"
    monkeypatch.setattr(times_module, "read_times", lambda *_: times)
    # The status of an unknown owner would wait for a beat.
    monkeypatch.setattr(status, "_LEASE_READ_S", 0.0)


@pytest.mark.parametrize("damage", [*DAMAGE, *OTHERS])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_or_does_not_matter(tmp_path, whole, name, damage):
    needed_by, read_by = FILES[name]
    for command in needed_by | read_by:
        with copied(whole, tmp_path, name) as (run, file):
            if damage in OTHERS:
                file.unlink()
                OTHERS[damage](file)
            else:
                file.write_bytes(DAMAGE[damage](file.read_bytes()))
            code, message = outcome(command, run)
        description = f"{command}: {code} {message}"
        assert code in (0, WRONG_DATA, WRONG_CONFIG), description
        if code:  # a profile without a record does not count
            assert file.name in message or "existing profile" in message, description
        if damage not in OTHERS and command != "status":
            assert bool(code) == (command in needed_by), description


def test_every_command_reads_an_undamaged_run(whole, tmp_path):
    for command in COMMANDS:
        with copied(whole, tmp_path, "config.yaml") as (run, _):
            assert outcome(command, run) == (0, ""), command


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("emptied", [True, False])
def test_a_log_that_was_emptied_or_deleted_is_a_warning(
    tmp_path, whole, caplog, name, emptied
):
    with copied(whole, tmp_path, name) as (run, file):
        file.write_bytes(b"")
        if not emptied:
            file.unlink()
        first_record = (run / "starts" / "1.yaml").read_bytes()
        assert outcome("train", run) == (0, "")
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        (warning,) = [line for line in warnings if "taken over" not in line]
        assert str(file) in warning
        assert "emptied or deleted" in warning
        # The record of an earlier start is never written over.
        assert (run / "starts" / "1.yaml").read_bytes() == first_record
        assert (run / "starts" / "2.yaml").exists()
