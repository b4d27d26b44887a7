"""`cluster=ssh` against an ssh that stays on this machine (fake_ssh.py)."""

import os
import signal
from dataclasses import replace

import pytest

from launch.remote import attempt, ssh
from tests.launch.remote.stage import SshStage, until
from train.errors import Exit

STAGES = (SshStage,)


def test_processes_know_their_places(stage):
    at = stage(0)
    assert at.submit(replace(at.cluster, processes_per_node=2, port=1234)) == 0
    assert at.codes == [[0] * 4]
    places = [(at.stub / f"place-{rank}").read_text() for rank in range(4)]
    assert places == [f"{r} {r % 2} 4 2 n0 1234\n" for r in range(4)]


def test_one_process_is_alone(stage):
    at = stage(0)
    assert at.submit(replace(at.cluster, hosts=["n0"])) == 0
    assert (at.stub / "place-0").read_text().split() == []
    assert at.pid("n0", 0).parent.parent.joinpath("run.sh").stat().st_mode & 0o77 == 0


def test_a_lost_host_is_waited_for(stage, monkeypatch, caplog):
    """It is lost, all are started again once it is back, and that does not count."""
    monkeypatch.setattr(attempt, "LOST_S", 0.5)
    monkeypatch.setattr(attempt, "SILENT_S", 0.5)
    at = stage("run", 0)

    def go_away() -> None:
        off = at.cut_off("me@n1")
        os.kill(int(at.pid("n0", 0).read_text()), signal.SIGTERM)
        until(lambda: "No route to host" in caplog.text)
        off.unlink()

    at.later(lambda: at.starts() == [1, 1], go_away)
    assert at.submit(replace(at.cluster, max_restarts=0)) == 0
    assert at.codes == [[42, None], [0, 0]]
    assert at.starts() == [2, 2]  # what ran on was ended before


def test_a_host_that_lets_nobody_in(stage):
    at = stage(0)
    at.cut_off("n0", "me@n0: Permission denied (publickey).")
    with pytest.raises(Exit, match=r"n0: .*Permission denied \(publickey\)") as raised:
        at.submit()
    assert raised.value.code == 78


def test_a_host_without_the_folder_of_the_run(stage):
    """Its processes would be a run of their own."""
    at = stage(0)
    home = at.fake / "home/me@n1"
    home.mkdir()
    (home / ".bashrc").write_text("test() { return 1; }\n")  # it sees no such file
    wrong = r"me@n1 does not see .*/run: cluster=ssh wants a folder"
    with pytest.raises(Exit, match=wrong):
        at.submit()
    assert not at.starts()


def test_status_counts_who_does_not_answer(stage):
    at = stage()
    at.cut_off()
    assert ssh.status(at.kept())[-1] == "2 processes: no answer"
