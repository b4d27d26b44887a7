"""`cluster=ssh` with an ssh that runs commands on this machine (fake_ssh.py)."""

import os
import signal
from dataclasses import replace

import pytest

from launch.remote import attempt, ssh
from tests.launch.remote.stage import SshStage, until
from train.errors import Exit

STAGES = (SshStage,)


def test_processes_know_their_ranks(stage):
    run = stage(0)
    assert run.submit(replace(run.cluster, processes_per_node=2, port=1234)) == 0
    assert run.codes == [[0] * 4]
    places = [(run.stub / f"place-{rank}").read_text() for rank in range(4)]
    assert places == [f"{r} {r % 2} 4 2 n0 1234\n" for r in range(4)]


def test_a_single_process_has_no_ranks(stage):
    run = stage(0)
    assert run.submit(replace(run.cluster, hosts=["n0"])) == 0
    assert (run.stub / "place-0").read_text().split() == []
    assert run.pid("n0", 0).parent.parent.joinpath("run.sh").stat().st_mode & 0o77 == 0


def test_a_lost_host_is_waited_for(stage, monkeypatch, caplog):
    """All processes start again once the host is back; the restart does not count."""
    monkeypatch.setattr(attempt, "LOST_S", 0.5)
    monkeypatch.setattr(attempt, "SILENT_S", 0.5)
    run = stage("run", 0)

    def lose_host() -> None:
        cut = run.cut_off("me@n1")
        os.kill(int(run.pid("n0", 0).read_text()), signal.SIGTERM)
        until(lambda: "No route to host" in caplog.text)
        cut.unlink()

    run.later(lambda: run.starts() == [1, 1], lose_host)
    assert run.submit(replace(run.cluster, max_restarts=0)) == 0
    assert run.codes == [[42, None], [0, 0]]
    assert run.starts() == [2, 2]  # the surviving process had ended


def test_a_host_that_refuses_the_login_is_named(stage):
    run = stage(0)
    run.cut_off("n0", "me@n0: Permission denied (publickey).")
    with pytest.raises(Exit, match=r"n0: .*Permission denied \(publickey\)") as raised:
        run.submit()
    assert raised.value.code == 78


def test_a_host_that_does_not_see_the_run_directory_is_refused(stage):
    """Its processes would otherwise be a separate run."""
    run = stage(0)
    home = run.fake / "home/me@n1"
    home.mkdir()
    (home / ".bashrc").write_text("test() { return 1; }\n")  # no file exists there
    message = r"me@n1 does not see .*/run: cluster=ssh wants a folder"
    with pytest.raises(Exit, match=message):
        run.submit()
    assert not run.starts()


def test_status_counts_processes_that_do_not_answer(stage):
    run = stage()
    run.cut_off()
    assert ssh.status(run.kept())[-1] == "2 processes: no answer"
