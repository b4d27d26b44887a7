"""What a supervisor here does for machines elsewhere, whichever kind they are."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from launch.node import STOP
from launch.remote import attempt, supervise
from launch.remote.hosts import Hosts
from launch.submissions import newest
from launch.subprocesses import ASK_S, LONGEST_S, run_captured
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
        off, before = at.cut_off(), len(at.calls())
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


def stop_from_another_machine(at: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "alive", lambda _: False)  # as seen from there
    assert at.backend.stop(newest(at.job.run_dir)) == 0


def test_stopped_from_another_machine_while_nobody_answers(stage, monkeypatch):
    """The supervisor starts nothing once they do answer, nor asks for machines."""
    monkeypatch.setattr(attempt, "LOST_S", 0.1)
    at = stage(0)
    off, hosts = at.cut_off(), type(hosts_of(at))
    start = hosts._start

    def in_vain(self: Hosts) -> bool:
        monkeypatch.setattr(hosts, "_start", start)
        assert not start(self)
        stop_from_another_machine(at, monkeypatch)
        off.unlink()
        return False

    monkeypatch.setattr(hosts, "_start", in_vain)
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
    assert hosts_of(at).begin(Wait(), take_up=False)
    until(lambda: at.starts() == [1, 1])
    said = at.backend.status(submission)
    assert any("not kept running" in line for line in said)
    at.backend.logs(submission, follow=False)
    assert capsys.readouterr().out == "start 1\n"
    assert at.backend.stop(submission) == 0
    assert "saved" in (at.folder / supervise.LOG).read_text()


def test_only_what_copies_and_starts_may_take_long(stage, monkeypatch):
    """One host that hangs holds up the others for two minutes, and not for thirty."""
    at, limits = stage(1), dict[float, str]()

    def noted(words: list[str], timeout_s: float = LONGEST_S, **more: Any) -> Any:
        limits[timeout_s] = limits.get(timeout_s, "") + f"{words[-1]}\n"
        return run_captured(words, timeout_s, **more)

    module = sys.modules[type(hosts_of(at)).__module__]
    monkeypatch.setattr(module, "run_captured", noted)
    assert at.submit(replace(at.cluster, max_restarts=0)) == 1
    hosts_of(at).ask("signal", "INT")
    assert {*limits} == {ASK_S, LONGEST_S}
    for asked in (" poll ", " signal ", " said ", " tail "):
        assert asked in limits[ASK_S]
        assert asked not in limits[LONGEST_S]
    assert "run.sh start " in limits[LONGEST_S]
    assert "run.sh start " not in limits[ASK_S]


def test_the_environment_is_on_no_command_line(stage):
    at = stage(0)
    at.job = replace(at.job, environment={"SAID": "value"})
    assert at.submit() == 0
    assert len(at.calls()) > 4
    assert not [call for call in at.calls() if "value" in " ".join(call)]
    assert "export SAID=value" in (at.folder / "run.sh").read_text()
