"""The ground of all drills: a text, a tiny model, and its undisturbed runs."""

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

STEPS = 40  # the last step of an undisturbed run
HALF = 20  # the step from which a run of `half` continues
OVERRIDES = (
    *TINY,
    # The rate is constant, so a shorter run is the beginning of a longer one.
    *("schedule=constant", f"train.num_steps={STEPS}"),
    *("checkpoint.save_interval_steps=5", "eval.final_num_batches=1"),
    *("run.lease_interval_s=0.5", "run.lease_timeout_s=8"),
    "runtime.allow_fault_injection=true",
)
# A promise in seconds holds for a quiet machine of today. The machine that tests it may
# be this many times slower.
SLOWER = 4
_MARK = "LONGHAUL_DRILL_PLACE"  # set for all processes of a drill


class Ground:
    """A folder for one drill, with the text, cache and runs that all drills share."""

    patience_s = 30.0 * SLOWER  # how long processes may outlive a drill

    def __init__(self, root: Path, folder: str = "shared"):
        """Use a folder under `root`; write the shared text if it does not exist yet."""
        self.root = root
        self.place = root / folder
        self.keep = False  # whether the folder is kept
        self.traceback = False  # whether logs may contain one
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
        """Make a folder for a drill, and remove it afterwards unless `keep` is set."""
        ground = Ground(self.root, name)
        ground.place.mkdir()
        try:
            yield ground
        finally:
            while pids := ground.survivors():
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            if not ground.keep:
                shutil.rmtree(ground.place, ignore_errors=True)

    def run(self, *overrides: str, name: str = "run") -> Run:
        """Return the run with this name, whether it exists or not."""
        data = f"data.path={self.text}", f"data.cache_dir={self.cache}"
        return Run(self.place / name, (*OVERRIDES, *data, *overrides), self.environment)

    def straight(self, count: int = 1) -> Run:
        """Return an undisturbed run of `count` processes; train it only once."""
        shared = Ground(self.root)
        run = shared.run("checkpoint.keep_every_steps=5", name=f"straight-{count}")
        if not run.results:
            shutil.rmtree(run.path, ignore_errors=True)
            run.finish(count=count)
        return run

    def half(self, count: int = 1, name: str = "run") -> Run:
        """Return a copy of a run that ended after 20 steps and kept every checkpoint.

        The next start of the copy continues to step 40.
        """
        all_steps = "checkpoint.save_interval_steps=1", "checkpoint.keep_every_steps=1"
        original = Ground(self.root).run(*all_steps, name=f"half-{count}")
        if not original.results:
            shutil.rmtree(original.path, ignore_errors=True)
            original.finish(f"train.num_steps={HALF}", count=count)
        run = self.run(name=name)
        shutil.copytree(original.path, run.path)
        return run

    def check(
        self, run: Run, steps: int = STEPS, rel: float = 0, count: int = 1
    ) -> None:
        """Compare the losses and last arrays of a run with those of an undisturbed run.

        Args:
            run: The finished run.
            steps: The number of its steps, a multiple of 5.
            rel: The relative tolerance of the losses. Above 0, arrays are not compared.
            count: The number of processes of the undisturbed run.
        """
        check_equal(run, self.straight(count), steps, rel)

    def survivors(self) -> list[int]:
        """List the live processes that this drill started, directly or indirectly."""
        mark = f"{_MARK}={self.place}\0".encode()
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
            except OSError:
                continue
        return pids

    def check_nothing_is_left(self) -> None:
        """Check that all processes end and that no log contains a traceback."""
        deadline = time.monotonic() + self.patience_s
        while pids := self.survivors():
            names = [command_of(pid) for pid in pids]
            assert time.monotonic() < deadline, f"orphans: {names}"
            time.sleep(0.1)
        for log in sorted(self.place.rglob("log.*")):
            text = log.read_text(errors="replace")
            position = text.find("Traceback (most recent")
            assert self.traceback or position < 0, f"{log}: {text[position:][:2000]}"


def check_equal(run: Run, straight: Run, steps: int, rel: float = 0) -> None:
    """Check that a run has each step once, with the losses and arrays of another."""
    losses = run.losses()
    expected_losses = straight.losses()
    assert list(losses) == [*range(1, steps + 1)], f"steps {list(losses)}"
    for step, loss in losses.items():
        is_equal = math.isclose(loss, expected_losses[step], rel_tol=rel, abs_tol=0)
        assert is_equal, (
            f"loss of step {step}: {loss!r}, expected {expected_losses[step]!r}"
        )
    if rel == 0:
        arrays = run.arrays(steps)
        expected_arrays = straight.arrays(steps)
        assert arrays.keys() == expected_arrays.keys(), (
            f"{arrays.keys()} {expected_arrays.keys()}"
        )
        for name, array in arrays.items():
            is_equal = array.tobytes() == expected_arrays[name].tobytes()
            assert is_equal, f"{name} of step {steps} differs"


def command_of(pid: int) -> str:
    """Return the command line of a process, or its id if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
