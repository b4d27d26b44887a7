"""What a supervisor here does for machines elsewhere, whichever kind they are."""

from dataclasses import replace

import pytest

from launch.node import STOP
from launch.remote import attempt, supervise
from launch.remote.hosts import Hosts
from launch.supervisor import Wait
from tests.launch.remote.stage import Stage, interrupt, until


@pytest.mark.parametrize(("starts", "code"), [((1, 42, 134, 0), 0), ((78,), 78)])
def test_ends_mean_what_they_mean_everywhere(stage, starts, code):
    at = stage(*starts)
    assert at.submit() == code
    assert at.codes == [[start] * 2 for start in starts]


def test_a_broken_connection_harms_nothing(stage):
    at = stage("run")

    def break_for_a_while() -> None:
        off = at.cut_off()
        before = len(at.calls())
        until(lambda: len(at.calls()) > before + 4)
        (at.stub / "finish").touch()
        off.unlink()

    at.later(lambda: at.starts() == [1, 1], break_for_a_while)
    assert at.submit() == 0
    assert at.starts() == [1, 1]


def test_ctrl_c_lets_the_run_save(stage, capfd):
    at = stage("run")
    at.later(lambda: at.starts() == [1, 1], interrupt)
    assert at.submit() == 130
    assert at.codes == [[130] * 2]
    assert "saved" in capfd.readouterr().err


def test_ctrl_c_while_nobody_answers(stage):
    at = stage(0)
    at.cut_off()
    at.later(lambda: len(at.calls()) > 4, interrupt)
    assert at.submit() == 130
    assert not at.starts()


def test_stopped_from_another_machine_while_it_starts(stage, monkeypatch):
    at = stage("run")
    hosts = type(hosts_of(at))
    start = hosts._start

    def asked_meanwhile(self: Hosts) -> bool:
        started = start(self)
        until(lambda: at.starts() == [1, 1])
        (at.folder / STOP).touch()
        return started

    monkeypatch.setattr(hosts, "_start", asked_meanwhile)
    assert at.submit() == 130
    assert at.codes == [[130] * 2]


def test_another_supervisor_takes_up_what_runs(stage, monkeypatch):
    """As after a crash of this machine: nothing is started twice."""
    at = stage("run")

    class Gone(BaseException):
        pass

    def die(*_: object) -> None:
        raise Gone

    with monkeypatch.context() as patch:
        patch.setattr(type(hosts_of(at)), "release", lambda *_: None)
        patch.setattr(attempt.RemoteAttempt, "_copy_output", die)
        with pytest.raises(Gone):
            at.submit()
    until(lambda: at.starts() == [1, 1])
    before = len(at.calls())
    finish = (at.stub / "finish").touch
    at.later(lambda: len(at.calls()) > before + 6, finish)
    assert at.submit() == 0
    assert at.starts() == [1, 1]


def hosts_of(at: Stage):
    return supervise.submitted_hosts(at.kept())


def test_verbs_without_a_supervisor(stage, capsys):
    at = stage("run")
    submission = at.kept()
    assert hosts_of(at).begin(Wait(), watch_running=False)
    until(lambda: at.starts() == [1, 1])
    said = at.backend.status(submission)
    assert any("not kept running" in line for line in said)
    at.backend.logs(submission, follow=False)
    assert capsys.readouterr().out == "start 1\n"
    assert at.backend.stop(submission) == 0
    assert "saved" in (at.folder / supervise.LOG).read_text()


def test_the_environment_is_on_no_command_line(stage):
    at = stage(0)
    at.job = replace(at.job, environment={"SAID": "value"})
    assert at.submit() == 0
    assert len(at.calls()) > 4
    assert not [call for call in at.calls() if "value" in " ".join(call)]
    assert "export SAID=value" in (at.folder / "run.sh").read_text()
