"""Drills of the ownership of a run, of clocks, and of an unreachable network."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from tests.drills.drill import drill, expect
from tests.drills.ground import Ground
from tests.drills.run import Run, until
from tests.fleet import free_port

_OWNED = 75


@drill(26, promise="two owners")
def several_starts_at_once(ground: Ground) -> str:
    """Two starts run at once. The one that trains is suspended (SIGSTOP) while a third
    start finds it; then it gets SIGKILL, and a fourth starts -> the second and third
    end with 75 and name the owner; the fourth takes over at once, and ends with the
    same bits."""
    run = ground.run()
    starts = [run.start(), run.start()]
    until(lambda: 5 in run.sealed())
    owner = next(fleet for fleet in starts if "from step" in fleet.said())
    owner.send(signal.SIGSTOP)
    (second,) = (fleet for fleet in starts if fleet is not owner)
    pid = owner.processes[0].pid
    took = []
    for refused in (second, run.start()):
        began = time.monotonic()
        expect("exit codes", refused.wait(), [_OWNED])
        took.append(time.monotonic() - began)
        assert f"owned by process {pid} on host" in refused.said(), refused.said()
    owner.send(signal.SIGKILL)
    expect("exit codes", owner.wait(), [137])
    newest = run.sealed()[-1]
    fleet = run.finish()
    assert f"taken over from process {pid}" in fleet.said(), fleet.said()
    assert f"from step {newest}\n" in fleet.said(), fleet.said()
    ground.check(run)
    return f"75 twice ({took[1]:.1f} s with the imports), taken over, bits equal"


@drill(27)
def clocks_that_are_an_hour_off(ground: Ground) -> str:
    """All events are dated an hour ahead, and the times of checkpoints are in reverse
    order. The lease on another machine belongs first to a live owner whose clock is an
    hour slow, then to a dead one whose clock is an hour fast -> the live owner makes
    the start end with 75; the dead one is replaced after lease_timeout_s=8 without a
    sign of life; the run continues from step 20, keeps the newest two steps, has no
    negative time, and ends with the same bits."""
    run = ground.half()
    for step in run.steps():
        hour = time.time() + 3600 - step
        os.utime(run.folder(step), (hour, hour))
    rows = [{**row, "time": row["time"] + 3600} for row in run.rows("events")]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run.path / "events.jsonl").write_text(lines)
    with foreign_owner(run, hours=-1, alive=True):
        fleet = run.start()
        expect("exit codes", fleet.wait(), [_OWNED])
        assert "host elsewhere" in fleet.said(), fleet.said()
    with foreign_owner(run, hours=1, alive=False):
        fleet = run.finish()
    assert "taken over from process 7 on host elsewhere" in fleet.said(), fleet.said()
    assert "from step 20\n" in fleet.said(), fleet.said()
    expect("kept", run.sealed()[-2:], [35, 40])
    negative = [row for row in run.rows("events") if row["seconds"] < 0]
    expect("negative times", negative, [])
    ground.check(run)
    return "75 while it beats, taken over once silent, from step 20, bits equal"


@contextlib.contextmanager
def foreign_owner(run: Run, hours: int, alive: bool) -> Iterator[None]:
    """Write the lease of another machine with a wrong clock; renew it if alive."""
    ended = threading.Event()
    since = time.strftime(
        "%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + 3600 * hours)
    )
    owner = {"token": "0" * 32, "host": "elsewhere", "machine": "another boot"}
    owner |= {"pid": 7, "start": 1, "since": since}

    def keep() -> None:
        for beat in range(10**6):
            new = run.path / "lease.new"
            new.write_text(json.dumps({**owner, "beat": beat}))
            new.rename(run.path / "lease.json")
            if not alive or ended.wait(0.3):
                return

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@drill(29)
def tracker_that_cannot_be_reached(ground: Ground) -> str:
    """The tracker is online at a port where no one listens, and then at one that never
    answers -> both runs end with 0 and the same bits."""
    durations = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, port in (
            ("closed", free_port()),
            ("silent", silent.getsockname()[1]),
        ):
            overrides = "tracker=[wandb,mlflow]", "tracker.wandb.mode=online"
            run = ground.run(*overrides, name=name)
            began = time.monotonic()
            fleet = run.finish(
                environment={
                    "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
                    "WANDB_API_KEY": "0" * 40,
                    "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
                }
            )
            took_s = time.monotonic() - began
            for tracker in ("wandb", "mlflow"):
                count = fleet.said().count(f" {tracker} ")
                expect(f"what was said of {tracker}", count, 1)
            durations.append(f"{name}: {took_s:.0f} s")
            ground.check(run)
    return f"{'; '.join(durations)}; bits equal"
