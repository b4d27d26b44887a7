"""`cluster=ssh` against an ssh that stays on this machine (fake_ssh.py)."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch import supervisor
from launch.config import Code, SshCluster
from launch.job import Job
from launch.remote import attempt, ssh, ssh_hosts, supervise
from launch.submissions import Submission, keep
from launch.subprocesses import ROOT
from tests.launch import fake_ssh
from tests.launch.golden import equals_golden
from tests.launch.hostile import VALUES, argument_printer, printed
from train.cli.quoting import hydra_text
from train.errors import Exit

PATIENCE_S = 30
CLUSTER = SshCluster(hosts=["n0", "me@n1"], python="trainer", poll_s=0.05)
CLUSTER = replace(CLUSTER, backoff_s=0.01, max_restarts=2)

# Stands for training: says its place, and does what the next line of $STUB/plan says.
TRAINER = r"""#!/usr/bin/env bash
[ -z "${RANK-}" ] && RANK=0
count=$(($(cat "$STUB/$RANK" 2>/dev/null) + 1))
echo "$count" >"$STUB/$RANK"
end() { echo "saved"; exit "$1"; }
trap 'end 130' INT
trap 'end 42' TERM
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT" \
  >"$STUB/place-$RANK"
echo "start $count"
what=$(sed -n "${count}p" "$STUB/plan")
while [ "$what" = run ]; do sleep 0.05; [ -e "$STUB/finish" ] && exit 0; done
exit "${what:-0}"
"""


class Stage:
    """Hosts, a run, and what came of it."""

    def __init__(self, folder: Path, *starts: object):
        self.hosts = folder / "hosts"
        self.path = fake_ssh.install(self.hosts)
        trainer = self.hosts / "bin/trainer"
        trainer.write_text(TRAINER)
        trainer.chmod(0o755)
        self.stub = folder / "stub"
        self.stub.mkdir()
        (self.stub / "plan").write_text("".join(f"{start}\n" for start in starts))
        self.job = Job(
            *("name-12345678", str(folder / "run"), f"{folder}/run/launch/1"),
            *((), str(folder / "root"), str(folder)),
        )
        self.submission = Submission(self.job.run_dir, 1, "ssh", self.job.name, (), "")

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.path}:{os.environ['PATH']}"
        return {"FAKE_SSH": str(self.hosts), "STUB": str(self.stub), "PATH": path}

    def kept(self, cluster: SshCluster = CLUSTER) -> Submission:
        """Give the submission of a submission, which nobody watches."""
        submission = keep(
            self.submission, ssh.render(self.job, cluster).files, Path("/none")
        )
        return submission.with_handle(cluster=json.loads(json.dumps(vars(cluster))))

    def submit(self, cluster: SshCluster = CLUSTER) -> int:
        rendered = ssh.render(self.job, cluster)
        keep(self.submission, rendered.files, Path("/none"))
        return ssh.submit(self.job, cluster, rendered, self.submission)

    @property
    def codes(self) -> list[list[int | None]]:
        lines = (
            (Path(self.submission.folder) / "attempts.jsonl").read_text().splitlines()
        )
        return [json.loads(line)["codes"] for line in lines]

    def starts(self) -> list[int]:
        """Count the starts of each process."""
        files = sorted(self.stub.glob("[0-9]*"))
        return [int(file.read_text() or 0) for file in files]

    def off(self, host: str, why: str = "") -> Path:
        file = self.hosts / "off" / host
        file.write_text(why)
        return file

    def blind(self, host: str) -> None:
        """Have a host see no folders of others."""
        (self.hosts / "home" / host).mkdir()
        test = self.hosts / "home" / host / ".bashrc"
        test.write_text("test() { return 1; }\n")

    def later(self, holds: Callable[[], object], act: Callable[[], object]) -> None:
        """Act, in another thread, as soon as something holds."""

        def run() -> None:
            until(holds)
            act()

        threading.Thread(target=run, daemon=True).start()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def stage(tmp_path, monkeypatch) -> Iterator[Callable[..., Stage]]:
    monkeypatch.setattr(supervise, "run_step", lambda job: None)
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.02)
    monkeypatch.setattr(ssh_hosts, "_AGAIN_S", 0.05)

    def make(*starts: object) -> Stage:
        made = Stage(tmp_path, *starts)
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        return made

    yield make
    (tmp_path / "stub/finish").touch()  # ends what runs still


def test_processes_know_their_places(stage):
    at = stage(0)
    assert at.submit(replace(CLUSTER, processes_per_node=2, port=1234)) == 0
    assert at.codes == [[0] * 4]
    places = [(at.stub / f"place-{rank}").read_text() for rank in range(4)]
    assert places == [f"{r} {r % 2} 4 2 n0 1234\n" for r in range(4)]


def test_one_process_is_alone(stage):
    at = stage(0)
    assert at.submit(replace(CLUSTER, hosts=["n0"])) == 0
    assert (at.stub / "place-0").read_text().split() == ["0"]


@pytest.mark.parametrize(
    ("starts", "codes"),
    [
        ((1, 0), [1, 0]),
        ((1,) * 3, [1] * 3),
        ((78,), [78]),
        ((42, 134, 3), [42, 134, 3]),
    ],
)
def test_ends_mean_what_they_mean_everywhere(stage, starts, codes):
    at = stage(*starts)
    assert at.submit() == codes[-1]
    assert at.codes == [[code] * 2 for code in codes]


def test_one_process_killed(stage):
    at = stage("run", 0)

    def kill() -> None:
        process = at.hosts / f"home/me@n1/longhaul/{at.job.name}/process-1"
        until(lambda: (process / "pid").exists())
        os.kill(int((process / "pid").read_text()), signal.SIGKILL)
        # The others of a real run end by themselves, with 134.
        other = at.hosts / f"home/n0/longhaul/{at.job.name}/process-0/pid"
        os.kill(int(other.read_text()), signal.SIGTERM)

    at.later(lambda: at.starts() == [1, 1], kill)
    assert at.submit() == 0
    assert sorted(at.codes[0]) == [42, 137]
    assert at.codes[1:] == [[0, 0]]


def test_a_broken_connection_harms_nothing(stage):
    at = stage("run")

    def break_for_a_while() -> None:
        off = at.off("me@n1")
        time.sleep(1)
        (at.stub / "finish").touch()
        off.unlink()

    at.later(lambda: at.starts() == [1, 1], break_for_a_while)
    assert at.submit() == 0
    assert at.starts() == [1, 1]


def test_a_lost_host_is_waited_for(stage, monkeypatch, caplog):
    """It is lost, all are started again once it is back, and that does not count."""
    monkeypatch.setattr(attempt, "LOST_S", 0.5)
    monkeypatch.setattr(attempt, "SILENT_S", 0.5)
    at = stage("run", 0)

    def go_away() -> None:
        off = at.off("me@n1")
        other = at.hosts / f"home/n0/longhaul/{at.job.name}/process-0/pid"
        os.kill(int(other.read_text()), signal.SIGTERM)
        until(lambda: "No route to host" in caplog.text)
        off.unlink()

    at.later(lambda: at.starts() == [1, 1], go_away)
    assert at.submit(replace(CLUSTER, max_restarts=0)) == 0
    assert at.codes == [[42, None], [0, 0]]
    assert at.starts() == [2, 2]  # what ran on was ended before


def test_a_host_that_lets_nobody_in(stage):
    at = stage(0)
    at.off("n0", "me@n0: Permission denied (publickey).")
    with pytest.raises(Exit, match=r"n0: .*Permission denied \(publickey\)") as raised:
        at.submit()
    assert raised.value.code == 78


def test_a_host_without_the_folder_of_the_run(stage):
    """Its processes would be a run of their own."""
    at = stage(0)
    at.blind("me@n1")
    with pytest.raises(
        Exit, match=r"me@n1 does not see .*/run: cluster=ssh wants a folder"
    ):
        at.submit()
    assert not at.starts()


def test_ctrl_c_lets_the_run_save(stage, capfd):
    at = stage("run")
    at.later(lambda: at.starts() == [1, 1], lambda: os.kill(os.getpid(), signal.SIGINT))
    assert at.submit() == 130
    assert at.codes == [[130, 130]]
    assert "saved" in capfd.readouterr().err


def test_ctrl_c_while_hosts_are_away(stage, caplog):
    at = stage(0)
    at.off("n0")
    holds = lambda: "No route" in caplog.text  # noqa: E731
    at.later(holds, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert at.submit() == 130
    assert not at.starts()


def test_verbs_without_a_supervisor(stage, capsys):
    at = stage("run")
    submission = at.kept()
    hosts = ssh.SshHosts(submission, CLUSTER)
    assert hosts.begin(attempt.Wait(), take_up=False)
    until(lambda: at.starts() == [1, 1])
    said = ssh.status(submission)
    assert "not kept running" in said[0]
    assert re.fullmatch(r"\S+:0: running", said[1])
    ssh.logs(submission, follow=False)
    assert capsys.readouterr().out == "start 1\n"
    at.off("me@n1")
    assert ssh.status(submission)[-1] == "1 processes: no answer"
    (at.hosts / "off/me@n1").unlink()
    assert ssh.stop(submission) == 0
    ended = [line.split(": ")[1] for line in ssh.status(submission)[1:]]
    assert ended == ["ended 130", "ended 130"]


@pytest.mark.parametrize("code", [Code.shared, Code.archive])
def test_hostile_values_arrive_verbatim(tmp_path, code):
    environment = {f"SAID_{n}": value for n, value in enumerate(VALUES)}
    overrides = tuple(hydra_text("tracker.project", value) for value in VALUES)
    job = Job("job", "/run", "folder", overrides, "/root", str(tmp_path), environment)
    cluster = replace(CLUSTER, code=code)
    (tmp_path / "run.sh").write_text(ssh.render(job, cluster).files["run.sh"])
    argument_printer(tmp_path / "bin", "trainer")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    run = ["bash", str(tmp_path / "run.sh"), "start", "0", "1"]
    subprocess.run(run, env={**os.environ, "PATH": path}, check=True)
    until(lambda: (tmp_path / "process-0/code").exists())
    words = printed(tmp_path / "bin")[-1]
    train = words.index("train")
    assert words[train - 2 :] == ["-P", "-m", "train", *overrides]


def test_the_environment_is_on_no_command_line(stage):
    at = stage(0)
    at.job = replace(at.job, environment={"SAID": "value"})
    shutil.move(at.path / "ssh", at.path / "real")
    printer = argument_printer(at.hosts / "seen", "ssh")
    both = f'#!/bin/sh\n{printer} "$@"\nexec {at.path}/real "$@"\n'
    (at.path / "ssh").write_text(both)
    (at.path / "ssh").chmod(0o755)
    assert at.submit() == 0
    calls = printed(at.hosts / "seen")
    assert len(calls) > 4
    assert not [call for call in calls if "value" in " ".join(call)]
    script = at.hosts / f"home/n0/longhaul/{at.job.name}/run.sh"
    assert "export SAID=value" in script.read_text()
    assert script.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        (
            "shared",
            replace(CLUSTER, python="/venv/bin/python", setup=["module load x"]),
        ),
        ("archive", replace(CLUSTER, code=Code.archive, processes_per_node=8)),
    ],
)
def test_rendered(name, cluster):
    job = Job(
        *("base-1b-12345678", "/runs/base-1b", "/runs/base-1b/launch/1"),
        *(("model=gpt_nano", 'run.dir="/runs/base-1b"'), "/root", "/here"),
        environment={"A": "b c"},
    )
    equals_golden(f"ssh/{name}", ssh.render(job, cluster))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hosts": []}, "must name at least one"),
        ({"hosts": ["-oProxyCommand=x"]}, "must be a host as ssh takes it"),
        ({"hosts": ["a b"]}, "must be a host as ssh takes it"),
        ({"hosts": ["a", "a"]}, "must differ"),
        ({"address": "$(x)"}, "must be a host as ssh takes it"),
        ({"code": Code.image}, "must be shared or archive"),
    ],
)
def test_mistakes(changes, said):
    found = ssh.mistakes(replace(CLUSTER, **changes), "/runs/a")
    assert [said in mistake.rule for mistake in found] == [True]
    assert not ssh.mistakes(CLUSTER, "/runs/a")


def test_the_preset_says_what_the_defaults_are():
    preset = yaml.safe_load((ROOT / "configs/cluster/ssh.yaml").read_text())
    assert preset == {**vars(SshCluster()), "code": "shared"}
