"""What drills stand on: a text, a tiny model, and runs of it that nothing disturbed."""

import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from tests.drills.run import Run
from tests.fleet import TINY

STEPS = 40  # of an undisturbed run
HALF = 20  # of one to go on from
OVERRIDES = (
    *TINY,
    # At a constant rate a shorter run is the beginning of a longer one, and with
    # larger batches a step is long enough for a signal to hit it.
    *("schedule=constant", "data.sequence_length=64", "data.batch_size=64"),
    *(f"train.num_steps={STEPS}", "checkpoint.save_interval_steps=5"),
    *("eval.final_num_batches=1", "run.lease_interval_s=0.5", "run.lease_timeout_s=8"),
    "runtime.allow_fault_injection=true",
)
_MARK = "LONGHAUL_DRILL_PLACE"  # in the environment of all that a drill starts


class Ground:
    """A place for one drill, and what all drills share."""

    patience_s = 30.0  # with processes that outlive a drill

    def __init__(self, root: Path, place: str = "shared"):
        """Take a folder, empty at first."""
        self.root = root
        self.place = root / place
        self.keep = False  # what lies in it
        self.traceback = False  # whether one may be there
        self.text = root / "text.txt"
        self.cache = root / "cache"
        self.environment = {_MARK: str(self.place), "XDG_CACHE_HOME": f"{self.cache}"}
        if not self.text.exists():
            source = Path(yaml.__file__).parent
            words = [
                (source / name).read_text() for name in ("scanner.py", "parser.py")
            ]
            self.text.write_text("".join(words))

    @contextmanager
    def place_of(self, name: str) -> Iterator["Ground"]:
        """Make a place for a drill, removed unless it is to be kept."""
        ground = Ground(self.root, name)
        ground.place.mkdir()
        try:
            yield ground
        finally:
            while left := ground.survivors():
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            if not ground.keep:
                shutil.rmtree(ground.place, ignore_errors=True)

    def run(self, *overrides: str, name: str = "run") -> Run:
        """Give a run of a name, new or old."""
        data = f"data.path={self.text}", f"data.cache_dir={self.cache}"
        return Run(self.place / name, (*OVERRIDES, *data, *overrides), self.environment)

    def straight(self, count: int = 1) -> Run:
        """Give the run of so many processes that nothing disturbed; made once."""
        shared = Ground(self.root)
        run = shared.run("checkpoint.keep_every_steps=5", name=f"straight-{count}")
        if not run.results:
            shutil.rmtree(run.path, ignore_errors=True)
            run.finish(count=count)
        return run

    def half(self, count: int = 1, name: str = "run") -> Run:
        """Give a copy of a run that ended after 20 steps, with a checkpoint of each.

        Its next start goes on to step 40.
        """
        all_steps = "checkpoint.save_interval_steps=1", "checkpoint.keep_every_steps=1"
        whole = Ground(self.root).run(*all_steps, name=f"half-{count}")
        if not whole.results:
            shutil.rmtree(whole.path, ignore_errors=True)
            whole.finish(f"train.num_steps={HALF}", count=count)
        run = self.run(name=name)
        shutil.copytree(whole.path, run.path)
        return run

    def check(
        self, run: Run, steps: int = STEPS, rel: float = 0, count: int = 1
    ) -> None:
        """Compare all losses of a run, and its last arrays, with an undisturbed one's.

        Args:
            run: at its end.
            steps: how many it has, a multiple of 5.
            rel: what losses may differ by, relatively; then arrays are not looked at.
            count: processes of the undisturbed one.
        """
        check_equal(run, self.straight(count), steps, rel)

    def survivors(self) -> list[int]:
        """List the processes that this drill started, directly or not."""
        mark = f"{_MARK}={self.place}\0".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def check_nothing_is_left(self) -> None:
        """Make sure that all processes end, with no traceback and no shared memory."""
        deadline = time.monotonic() + self.patience_s
        while left := self.survivors():
            names = [command_of(pid) for pid in left]
            assert time.monotonic() < deadline, f"orphans: {names}"
            time.sleep(0.1)
        for log in sorted(self.place.rglob("log.*")):
            said = log.read_text(errors="replace")
            found = said.find("Traceback (most recent")
            assert self.traceback or found < 0, f"{log}: {said[found:][:2000]}"


def check_equal(run: Run, straight: Run, steps: int, rel: float = 0) -> None:
    """Compare the losses of all steps of a run, each once, and its last arrays."""
    losses = run.losses()
    wanted = straight.losses()
    assert list(losses) == [*range(1, steps + 1)], f"steps {list(losses)}"
    for step, loss in losses.items():
        same = math.isclose(loss, wanted[step], rel_tol=rel, abs_tol=0)
        assert same, f"loss of step {step}: {loss!r}, expected {wanted[step]!r}"
    if rel == 0:
        arrays = run.arrays(steps)
        others = straight.arrays(steps)
        assert arrays.keys() == others.keys(), f"{arrays.keys()} {others.keys()}"
        for name, array in arrays.items():
            same = array.tobytes() == others[name].tobytes()
            assert same, f"{name} of step {steps} differs"


def command_of(pid: int) -> str:
    """Say what a process runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
