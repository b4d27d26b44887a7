"""Drills in which one of several processes dies, stops or hangs."""

import signal
import time

from tests.drills.drill import drill, expect
from tests.drills.ground import SLOWER, Ground
from tests.drills.preemption import goes_on
from tests.fleet import free_port

_ABORTED = 134
_KILLED = 137


@drill(15)
def one_of_two_stopped(ground: Ground) -> str:
    """SIGSTOP goes to process 1 of two (heartbeat 10 s), and SIGCONT once the other has
    ended -> the other ends with 134 within 30 s; the stopped one ends once it is awake;
    the next start ends with the same bits."""
    ground.traceback = True  # process 1 wakes, and its peer is gone
    run = ground.run()
    fleet = run.start(count=2)
    fleet.await_that(lambda: 5 in run.sealed())
    began = time.monotonic()
    fleet.send(signal.SIGSTOP, [1])
    fleet.processes[0].wait(30 * SLOWER)
    took = time.monotonic() - began
    fleet.send(signal.SIGCONT, [1])
    codes = fleet.wait()
    expect("exit code of process 0", codes[0], _ABORTED)
    assert codes[1] != _KILLED, "process 1 had to be killed"
    assert took < 30 * SLOWER, f"process 0 took {took:.0f} s"
    goes_on(run, run.sealed()[-1], count=2)
    ground.check(run, count=2)
    return f"process 0: 134 after {took:.1f} s, process 1: {codes[1]}; bits equal"


@drill(16, promise="hang")
def one_of_two_stuck_in_python(ground: Ground) -> str:
    """Process 1 of two sleeps forever after step 7 (LONGHAUL_DRILL), with a watchdog of
    20 s -> both end with 134, the stacks of both are on disk, and process 1 is named as
    the late one; the next start ends with the same bits."""
    run = ground.run()
    limit = "watchdog.step_timeout_s=20"
    ground.traceback = True  # one sees that its peer was aborted first
    fleet = run.start(limit, count=2, environment={"LONGHAUL_DRILL": "stuck:1:7"})
    expect("exit codes", fleet.wait(), [_ABORTED] * 2)
    assert "behind: process 1" in fleet.said(), fleet.said()[-2000:]
    for output in map(fleet.said, (0, 1)):
        assert output.count("Traceback (most recent") <= output.count("Gloo"), output[
            -2000:
        ]
    files = [f for n in (0, 1) for f in run.path.glob(f"stacks/*-process{n}.txt")]
    stacks = [file.read_text() for file in files]
    expect("files of stacks", len(stacks), 2)
    assert "fault_injection.py" in stacks[1], stacks[1]
    goes_on(run, run.sealed()[-1], count=2)
    ground.check(run, count=2)
    return f"134 twice, process 1 named, {len(stacks)} stacks; bits equal"


@drill(17, promise="lost process")
def process_0_of_two_killed(ground: Ground) -> str:
    """SIGKILL goes to process 0 of two, and the next start uses the same port at once
    -> the other process ends with 134 within 5 s; the next start ends with the same
    bits."""
    run = ground.run()
    port = free_port()
    ground.traceback = True
    fleet = run.start(count=2, port=port)
    fleet.await_that(lambda: 5 in run.sealed())
    fleet.send(signal.SIGKILL, [0])
    began = time.monotonic()
    fleet.processes[1].wait(5 * SLOWER)
    took = time.monotonic() - began
    expect("exit codes", fleet.wait(), [_KILLED, _ABORTED])
    assert took < 5 * SLOWER, f"process 1 took {took:.1f} s"
    goes_on(run, run.sealed()[-1], count=2, port=port)
    ground.check(run, count=2)
    return f"134 after {took:.1f} s, same port again, bits equal"


@drill(17)
def process_1_of_two_killed(ground: Ground) -> str:
    """SIGKILL goes to process 1 of two (heartbeat 30 s) -> the other ends with 134
    within 60 s, and its failed collective does not count as a crash of the step; the
    next start ends with the same bits."""
    run = ground.run("distributed.heartbeat_timeout_s=30")
    ground.traceback = True
    fleet = run.start(count=2)
    fleet.await_that(lambda: 5 in run.sealed())
    fleet.send(signal.SIGKILL, [1])
    began = time.monotonic()
    expect("exit codes", fleet.wait(), [_ABORTED, _KILLED])
    took = time.monotonic() - began
    assert took < 60 * SLOWER, f"process 0 took {took:.1f} s"
    expect("crashes", run.events("crash"), [])
    goes_on(run, run.sealed()[-1], count=2)
    ground.check(run, count=2)
    return f"134 after {took:.1f} s, bits equal"


@drill(18)
def a_process_never_arrives(ground: Ground) -> str:
    """The second of three processes never starts, with distributed.init_timeout_s=10 ->
    the others end with 134 and name it; nothing is written."""
    run = ground.run("distributed.init_timeout_s=10")
    fleet = run.start(count=3, missing=[1])
    expect("exit codes", fleet.wait(), [_ABORTED] * 2)
    for process in (0, 2):
        output = fleet.said(process)
        assert "no sign of process 1 of 3 within" in output, output
    expect("a run's directory", run.path.exists(), False)
    return "134 twice, process 1 named by both, nothing written"


@drill(30, promise="third crash")
def one_step_crashes_every_time(ground: Ground) -> str:
    """An exception is raised after step 7 in three starts (LONGHAUL_DRILL) -> the exit
    codes are 1, 1 and 70; the last start prints a command that shows the batch, and the
    command works; without the fault the run continues."""
    run = ground.run()
    codes = []
    ground.traceback = True
    for _ in range(3):
        fleet = run.start(environment={"LONGHAUL_DRILL": "crash:0:7"})
        codes += fleet.wait()
    expect("exit codes", codes, [1, 1, 70])
    command_line = f"data.inspect run.dir={run.path} step=6"
    assert command_line in fleet.said(), fleet.said()[-2000:]
    fleet = run.other("data.inspect", f"run.dir={run.path}", "step=6")
    expect("exit code of data.inspect", fleet.wait(), [0])
    goes_on(run, 5)
    ground.check(run)
    return "1, 1, 70, batch named; without the fault from step 5, bits equal"


@drill(32)
def a_copy_of_a_parameter_flipped(ground: Ground) -> str:
    """One bit of a parameter on one of four devices is flipped in memory after step 13
    (LONGHAUL_DRILL), and copies are compared at each save -> the run ends with 134 at
    step 15 and names array and device; nothing is saved from step 13 on; the next start
    ends with the same losses."""
    mesh = ("mesh.data=4", "mesh.fsdp=1", "runtime.cpu_devices=4")
    run = ground.run(*mesh)
    fault = {"LONGHAUL_DRILL": "flip:13:2:params.embedding.weight"}
    fleet = run.start(environment=fault)
    expect("exit codes", fleet.wait(), [_ABORTED])
    lines = [line for line in fleet.said().splitlines() if "silent corruption" in line]
    expect("sealed", max(run.sealed()), 10)
    corruptions = {(event["step"], event["device"]) for event in run.events("corrupt")}
    expect("steps and devices", corruptions, {(15, 2)})
    goes_on(run, 10)
    ground.check(run, rel=1e-5)
    return f"134: {lines[-1]}; from step 10, losses equal to 1e-5"
