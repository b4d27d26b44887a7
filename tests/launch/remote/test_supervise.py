"""A supervisor on this machine keeps a run going on remote machines of each kind."""

from dataclasses import replace

import pytest

from launch.node import STOP
from launch.remote import attempt, supervise
from launch.remote.hosts import Hosts
from launch.supervisor import Wait
from tests.launch.remote.stage import Stage, interrupt, until


@pytest.mark.parametrize(("starts", "code"), [((1, 42, 134, 0), 0), ((78,), 78)])
def test_exit_codes_mean_the_same_on_every_kind(stage, starts, code):
    run = stage(*starts)
    assert run.submit() == code
    assert run.codes == [[start] * 2 for start in starts]


def test_a_broken_connection_harms_nothing(stage):
    run = stage("run")

    def break_for_a_while() -> None:
        cut = run.cut_off()
        count = len(run.calls())
        until(lambda: len(run.calls()) > count + 4)
        (run.stub / "finish").touch()
        cut.unlink()

    run.later(lambda: run.starts() == [1, 1], break_for_a_while)
    assert run.submit() == 0
    assert run.starts() == [1, 1]


def test_ctrl_c_lets_the_run_save(stage, capfd):
    run = stage("run")
    run.later(lambda: run.starts() == [1, 1], interrupt)
    assert run.submit() == 130
    assert run.codes == [[130] * 2]
    assert "saved" in capfd.readouterr().err


def test_ctrl_c_ends_it_while_no_machine_answers(stage):
    run = stage(0)
    run.cut_off()
    run.later(lambda: len(run.calls()) > 4, interrupt)
    assert run.submit() == 130
    assert not run.starts()


def test_a_stop_from_another_machine_while_it_starts_is_obeyed(stage, monkeypatch):
    run = stage("run")
    hosts = type(hosts_of(run))
    start = hosts._start

    def start_then_request_stop(self: Hosts) -> bool:
        started = start(self)
        until(lambda: run.starts() == [1, 1])
        (run.folder / STOP).touch()
        return started

    monkeypatch.setattr(hosts, "_start", start_then_request_stop)
    assert run.submit() == 130
    assert run.codes == [[130] * 2]


def test_another_supervisor_takes_over_running_processes(stage, monkeypatch):
    """The first supervisor dies as in a crash, and no process starts twice."""
    run = stage("run")

    class Gone(BaseException):
        pass

    def die(*_: object) -> None:
        raise Gone

    with monkeypatch.context() as patch:
        patch.setattr(type(hosts_of(run)), "release", lambda *_: None)
        patch.setattr(attempt.RemoteAttempt, "_copy_output", die)
        with pytest.raises(Gone):
            run.submit()
    until(lambda: run.starts() == [1, 1])
    count = len(run.calls())
    finish = (run.stub / "finish").touch
    run.later(lambda: len(run.calls()) > count + 6, finish)
    assert run.submit() == 0
    assert run.starts() == [1, 1]


def hosts_of(run: Stage):
    return supervise.submitted_hosts(run.kept())


def test_status_logs_and_stop_work_without_a_supervisor(stage, capsys):
    run = stage("run")
    submission = run.kept()
    assert hosts_of(run).begin(Wait(), watch_running=False)
    until(lambda: run.starts() == [1, 1])
    status = run.backend.status(submission)
    assert any("not kept running" in line for line in status)
    run.backend.logs(submission, follow=False)
    assert capsys.readouterr().out == "start 1\n"
    assert run.backend.stop(submission) == 0
    assert "saved" in (run.folder / supervise.LOG).read_text()


def test_the_environment_is_on_no_command_line(stage):
    run = stage(0)
    run.job = replace(run.job, environment={"SAID": "value"})
    assert run.submit() == 0
    assert len(run.calls()) > 4
    assert not [call for call in run.calls() if "value" in " ".join(call)]
    assert "export SAID=value" in (run.folder / "run.sh").read_text()
