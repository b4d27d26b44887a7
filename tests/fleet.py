"""Start several real processes of `python -m train` on this machine, and stop them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import yaml

from data.program import PREFIX

REPOSITORY = Path(__file__).resolve().parents[1]

QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# A model that trains in seconds. No drill depends on the size of the model.
TINY = (
    *("model.num_layers=2", "model.embed_dim=32", "model.num_heads=2"),
    *("model.compute_dtype=float32", "model.init=scaled", "model.layer_unroll=1"),
    *("optimizer=adamw", "schedule.warmup_steps=2", "tracker=none"),
    *("data=text", "data.sequence_length=32", "data.batch_size=8"),
    *("train.num_steps=20", "log.interval_steps=1", "runtime.cpu_devices=1"),
    *("checkpoint.save_interval_steps=5", "eval.interval_steps=1000"),
    *("eval.final_num_batches=2", "distributed.init_timeout_s=60"),
    *("distributed.heartbeat_timeout_s=10", "distributed.barrier_timeout_s=60"),
)


def write_text(folder: Path) -> Path:
    """Write a training text into a folder, and return the folder."""
    source = Path(yaml.__file__).parent.joinpath("scanner.py").read_text()
    (folder / "text.txt").write_text(source)
    return folder


def of_text(folder: Path) -> tuple[str, str]:
    """Return the overrides that name the text of `write_text`."""
    return f"data.path={folder}/text.txt", f"data.cache_dir={folder}/cache"


def with_quick(flags: str) -> str:
    """Add flags to XLA_FLAGS that halve the compile time for the CPU.

    Since jax 0.11, which has only the slow emitters, the flags are unchanged.
    """
    return f"{flags} {QUICK}" if jax.__version_info__ < (0, 11) else flags


def free_port() -> int:
    """Return a port without a listener, below the range of ephemeral ports."""
    while True:
        port = 10_000 + int.from_bytes(os.urandom(2)) % 20_000
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port


STARTED: list["Fleet"] = []  # the fleets of the current test


class Fleet:
    """The processes of one start of a run.

    The exit codes are those that a shell sees: 134 for an abort, 137 for kill -9.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        count: int = 1,
        own: Callable[[int], Sequence[str]] = lambda process: (),
        missing: Sequence[int] = (),
        module: str = f"{PREFIX}train",
        environment: dict[str, str] | None = None,
        port: int | None = None,
    ):
        """Start the processes.

        Args:
            folder: the working folder, which also gets the output: `log.<process>`.
            overrides: the overrides of all processes.
            count: the number of processes.
            own: returns further overrides of one process.
            missing: the processes that are never started.
            module: the full name of the command's module.
            environment: further environment variables.
            port: the port of process 0; None chooses a free one.
        """
        address = f"localhost:{port or free_port()}"
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        env.setdefault("JAX_PLATFORMS", "cpu")
        # Compile as tests/conftest.py does, unless a test asks to compile as users do.
        if env.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
            env["XLA_FLAGS"] = with_quick(env.get("XLA_FLAGS", ""))
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        STARTED.append(self)
        for process in range(count):
            if process in missing:
                continue
            distributed_overrides = (
                f"distributed.coordinator_address={address}",
                f"distributed.num_processes={count}",
                f"distributed.process_id={process}",
            )
            command = [sys.executable, "-m", module, *overrides, *own(process)]
            with (folder / f"log.{process}").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        command + list(distributed_overrides if count > 1 else ()),
                        cwd=folder,
                        env=env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def said(self, process: int = 0) -> str:
        """Return the output of a process so far."""
        return (self._folder / f"log.{process}").read_text(errors="replace")

    def await_text(self, text: str, process: int = 0, timeout_s: float = 180) -> None:
        """Wait until a process has printed a text, and the rest of its line."""

        def is_printed() -> bool:
            _, found, rest = self.said(process).partition(text)
            return "\n" in found + rest

        self.await_that(is_printed, timeout_s)

    def await_that(self, condition: Callable[[], bool], timeout_s: float = 180) -> None:
        """Wait until a condition holds, and check it often.

        Raises:
            AssertionError: time runs out or the processes end before it holds.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            all_ended = all(p.poll() is not None for p in self.processes)
            if all_ended or time.monotonic() > deadline:
                if condition():
                    return
                self.end()
                outputs = "\n".join(self.said(i)[-3000:] for i in range(len(self)))
                raise AssertionError(
                    f"ended: {all_ended}, or too late; they said:\n{outputs}"
                )
            time.sleep(0.005)

    def send(self, number: int, processes: Sequence[int] = ()) -> None:
        """Send a signal to some processes, or to all if none is named."""
        for process in processes or range(len(self)):
            if self.processes[process].poll() is None:
                os.kill(self.processes[process].pid, number)

    def wait(self, timeout_s: float = 300) -> list[int]:
        """Wait until all processes end by themselves, and return their exit codes."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            self.end()
        return [
            128 - p.returncode if p.returncode < 0 else p.returncode
            for p in self.processes
        ]

    def end(self) -> None:
        """Kill all processes that are still running.

        Raises:
            TimeoutExpired: a process waits for a disk that does not answer.
        """
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait(60)

    def __len__(self) -> int:
        return len(self.processes)
