"""Submission as a user types it, to a kind of cluster that takes an archive."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from data import storage
from data.program import ROOT
from launch import __main__ as door
from launch import plan_check
from launch.archive import files_to_pack
from launch.config import LocalCluster, schema_of
from launch.config.clusters import Code
from launch.job import ARCHIVE, UNPACK, Rendered, shell
from launch.node import STOP
from launch.plan_check import Machine
from tests.launch.kinds import UNPACKER, contents
from train.cli.command import compose
from train.errors import ConfigError, Exit


@dataclass(frozen=True)
class Away(LocalCluster):
    code: Code = Code.archive


class Elsewhere(SimpleNamespace):
    """A backend that records the job and the submission."""

    def submit(self, job, cluster, rendered, submission):
        self.submission = submission
        self.job = job
        return 0


@pytest.fixture
def elsewhere(monkeypatch) -> Elsewhere:
    backend = Elsewhere(
        SECRETS_REMEDY="",
        cluster_mistakes=lambda *_: [],
        machine=lambda _: Machine(),
        render=lambda *_: Rendered({"job.sh": "line\n"}, ["bash", "job.sh"]),
        alive=lambda _: False,
    )
    monkeypatch.setitem(door.BACKENDS, "local", backend)
    return backend


def submit(monkeypatch, cluster, arguments: Sequence[str]) -> None:
    config = compose(arguments, "launch", schema_of("local"))
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    assert door.main(replace(config, cluster=cluster)) == 0


def test_the_record_holds_the_archive(elsewhere, tmp_path: Path, monkeypatch):
    arguments = [f"run.dir={tmp_path}/runs/x", "tracker=none"]
    submit(monkeypatch, Away(), arguments)
    folder = tmp_path / "runs/x/launch/1"
    packed = (folder / ARCHIVE).read_bytes()
    assert contents(packed).keys() == {*files_to_pack(ROOT)}
    assert (folder / UNPACK).read_bytes() == UNPACKER.read_bytes()
    sha = hashlib.sha256(packed).hexdigest()
    assert json.loads((folder / "record.json").read_text())["code"] == sha
    words = elsewhere.job.command(sys.executable, Code.archive)
    assert words[1:3] == [str(folder / UNPACK), str(folder / ARCHIVE)]
    submit(monkeypatch, LocalCluster(), arguments)
    assert not (tmp_path / "runs/x/launch/2" / ARCHIVE).exists()
    record = json.loads((tmp_path / "runs/x/launch/2/record.json").read_text())
    assert record["code"] is None


def test_a_stopped_run_resumes_in_a_folder_without_the_stop_file(
    elsewhere, tmp_path, monkeypatch
):
    submit(monkeypatch, LocalCluster(), [f"run.dir={tmp_path}/runs/x", "tracker=none"])
    (tmp_path / "runs/x/launch/1" / STOP).touch()
    submit(monkeypatch, LocalCluster(), [f"run.dir={tmp_path}/runs/x", "action=resume"])
    assert elsewhere.submission.number == 2
    assert not (elsewhere.submission.folder / STOP).exists()


def test_resume_warns_of_keys_without_effect(elsewhere, tmp_path, monkeypatch, caplog):
    arguments = (f"run.dir={tmp_path}/runs/x", "tracker=none", "model.num_layers=2")
    submit(monkeypatch, LocalCluster(), arguments)
    keys = "action=resume", "force=true", "run.rewind_to=20", "train.num_steps=99"
    submit(monkeypatch, LocalCluster(), [*arguments, *keys])
    assert elsewhere.submission.arguments == arguments
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    effects = [text.partition(":")[0] for text in warnings]
    assert effects == [
        f"{key} has no effect" for key in ("run.rewind_to", "train.num_steps")
    ]


def test_render_writes_the_script_and_the_archive(
    elsewhere, tmp_path: Path, monkeypatch, capsys
):
    arguments = [f"run.dir={tmp_path}/runs/x", "action=render"]
    cluster = Away()
    submit(monkeypatch, cluster, [*arguments, f"output={tmp_path}/out"])
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        *("job.sh", ARCHIVE, UNPACK)
    }
    submit(monkeypatch, cluster, arguments)
    assert "# ---- job.sh\nline\n" in capsys.readouterr().out


@pytest.fixture
def plan(elsewhere, monkeypatch) -> SimpleNamespace:
    """Make the machine known, and the plan end with `code`."""
    plan = SimpleNamespace(code=0)
    elsewhere.machine = lambda _: Machine(target="h100-8")
    elsewhere.render = lambda job, _: Rendered({}, [f"memory={job.staged_bytes}"])

    def run_module(module, arguments, variables, cwd, stdout):
        (folder,) = (a for a in arguments if a.startswith("output="))
        file = Path(cwd) / folder.removeprefix("output=") / "plan.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        save = {"bytes": 7, "how": "computed"}
        file.write_text(json.dumps({"host_save": save, "host_held_bytes": 5}))
        return SimpleNamespace(returncode=plan.code)

    monkeypatch.setattr(plan_check, "run_module", run_module)
    return plan


@pytest.mark.parametrize("action", ["submit", "render"])
def test_what_the_plan_refuses_is_neither_submitted_nor_rendered(
    plan, tmp_path, monkeypatch, capsys, action
):
    monkeypatch.chdir(tmp_path)
    for plan.code in (4, 65, 78):
        with pytest.raises(Exit, match="Refused: the plan says") as refused:
            submit(monkeypatch, Away(), [f"run.dir={tmp_path}/x", f"action={action}"])
        assert refused.value.code == plan.code
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("code", "more", "first", "memory"),
    [
        (0, (), "", 7),
        (0, ("plan_first=false",), "# No plan was made (plan_first=false): ", None),
        (1, (), "# The plan could not be made (exit code 1): ", None),
        (78, ("force=true",), "# With force=true this goes on, although ", None),
    ],
)
def test_render_asks_for_the_planned_memory_or_says_why_there_is_no_plan(
    plan, tmp_path, monkeypatch, capsys, code, more, first, memory
):
    monkeypatch.chdir(tmp_path)
    plan.code = code
    keys = (f"run.dir={tmp_path}/x", "action=render")
    submit(monkeypatch, LocalCluster(), [*keys, *more])
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line[: len(first)] for line in lines] == [first] * bool(first)
    assert last == f"memory={memory}"


@pytest.fixture
def no_store(monkeypatch) -> None:
    """Make the store refuse connections with an error of two lines."""
    pytest.importorskip("s3fs")
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)

    def refuse(path):
        raise RuntimeError(f"no connection to {path}\nand more about it")

    monkeypatch.setattr(type(epath.Path("s3://nowhere")), "exists", refuse)


def test_a_refusal_by_the_plan_comes_before_an_unreachable_directory(
    plan, no_store, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    plan.code = 78
    with pytest.raises(Exit, match="Refused: the plan says"):
        submit(monkeypatch, Away(), ["run.dir=s3://nowhere/runs/x"])


def test_an_unreachable_directory_is_reported_in_one_line(
    elsewhere, no_store, monkeypatch
):
    monkeypatch.setattr(storage, "ANSWER_S", 0.2)
    keys = "run.dir=s3://nowhere/runs/x", "action=status"
    with pytest.raises(Exit, match=r"s3://nowhere/runs/x.*: cannot be read") as raised:
        submit(monkeypatch, LocalCluster(), keys)
    assert "\n" not in str(raised.value)
    assert raised.value.code == 1


def test_a_directory_that_cannot_be_written_is_a_wrong_config(
    elsewhere, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read or written: Not a directory"):
        submit(monkeypatch, LocalCluster(), [f"run.dir={tmp_path}/file/run"])


@pytest.fixture
def read(elsewhere, monkeypatch, capsys) -> Callable[..., Any]:
    """Return a function that runs a command with json=true and reads its output."""

    def hand_over(job, cluster, rendered, submission):
        print("job 7; action=status shows its state")
        submission.with_handle(job="7")
        return 0

    elsewhere.submit = hand_over
    elsewhere.status = lambda _: ["job 7: pending"]
    elsewhere.stop = lambda _: 0

    def read(*arguments: str) -> Any:
        submit(monkeypatch, Away(), [*arguments, "json=true"])
        return json.loads(capsys.readouterr().out)

    return read


def test_a_program_reads_what_was_submitted(read, tmp_path):
    directory = f"{tmp_path}/runs/x"
    values = read(f"run.dir={directory}", "run.name=base", "tracker=none")
    folder = Path(directory) / "launch/1"
    record = json.loads((folder / "record.json").read_text())
    assert values.items() >= record.items()
    assert (values["run_name"], values["run_dir"]) == ("base", directory)
    assert (values["kind"], values["folder"]) == ("local", str(folder))
    assert values["handle"] == {"job": "7"}
    assert values["files"] == {"job.sh": "line\n"}
    assert values["command"] == ["bash", "job.sh"]
    assert values["unchecked"].startswith("No plan was made")
    assert values["exit_code"] == 0


def test_a_program_reads_the_state_and_the_end(read, elsewhere, tmp_path, monkeypatch):
    run = f"run.dir={tmp_path}/runs/x"
    read(run, "tracker=none")
    status = read(run, "action=status")
    assert (status["alive"], status["state"]) == (False, ["job 7: pending"])
    assert status["run"] is None
    (tmp_path / "runs/x/config.yaml").touch()
    result = SimpleNamespace(returncode=0, stdout='{"step": 3}')
    monkeypatch.setattr(door, "run_module", lambda *_, **options: result)
    elsewhere.alive = lambda _: True
    status = read(run, "action=status")
    assert (status["alive"], status["run"]) == (True, {"step": 3})
    assert status["number"] == 1
    assert read(run, "action=stop")["exit_code"] == 0


def test_only_the_command_line_of_a_resume_asks_for_json(
    read, tmp_path, monkeypatch, capsys
):
    run = f"run.dir={tmp_path}/runs/x"
    read(run, "tracker=none")
    submit(monkeypatch, Away(), [run, "action=resume"])
    assert capsys.readouterr().out.startswith("job 7; ")
    assert read(run, "action=resume")["number"] == 3


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("local", ()),
        ("ssh", ("cluster.hosts=[one,two]",)),
        ("slurm", ("cluster.nodes=2",)),
        ("gke_tpu", ("cluster.target=v5e-16", "cluster.image=a/b:c")),
        ("gke_gpu", ("cluster.nodes=2", "cluster.gpu=h100", "cluster.image=a/b:c")),
        ("tpu_vm", ("cluster.target=v5e-16", "cluster.zone=us-west4-a")),
        ("skypilot", ("cluster.accelerators=H100:8",)),
    ],
)
def test_a_program_reads_what_would_be_submitted(
    tmp_path, monkeypatch, capsys, kind, keys
):
    """The object has what people see: each file, and each line of shell."""
    store = (
        "gs://bucket" if kind in ("gke_tpu", "gke_gpu", "tpu_vm", "skypilot") else ""
    )
    arguments = [f"cluster={kind}", *keys, "action=render", "plan_first=false"]
    arguments += [f"run.dir={store or tmp_path}/runs/x", "run.name=base"]
    outputs = []
    for more in ([], ["json=true"], ["json=true", f"output={tmp_path}/out"]):
        monkeypatch.setattr(sys, "argv", ["launch", *arguments, *more])
        config = compose([*arguments, *more], "launch", schema_of(kind))
        assert door.launch_mistakes(config) == []
        assert door.main(config) == 0
        outputs.append(capsys.readouterr().out)
    values = json.loads(outputs[1])
    assert values["kind"] == kind
    assert values["run_name"] == "base"
    assert values["folder"].startswith(f"{values['run_dir']}/launch/")
    assert values["files"]
    texts = [f"# ---- {name}\n{text}\n" for name, text in values["files"].items()]
    lines = [*values["preparation"], shell(values["command"])]
    shown = f"# {values['unchecked']}\n" + "".join(texts)
    assert outputs[0] == shown + "".join(f"{line}\n" for line in lines)
    written = json.loads(outputs[2])["files"]
    assert all((tmp_path / "out" / name).read_text() for name in written)


def test_the_output_of_a_run_is_no_json():
    config = compose(["action=logs", "json=true"], "launch", schema_of("local"))
    (mistake,) = door.launch_mistakes(config)
    assert (mistake.key, mistake.value) == ("json", True)
    assert mistake.rule.startswith("does not go with action=logs")
