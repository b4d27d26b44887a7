"""Profile a run while it trains, when a file in its directory requests this.

`python -m train.profile` writes this file, `profile_request.json`. A thread of process
0 looks for it every two seconds. All processes agree on the step after which to begin
(train/distributed/preemption.py), and each traces its devices. The results are

    profiles/<step>/profile.json        what was traced; written last
    profiles/<step>/step.hlo.gz         the text of the compiled step
    profiles/<step>/plugins/profile/... the traces, for XProf and Perfetto

where <step> is the first traced step. The config key `profile.steps` profiles steps
without a request.
"""

import contextlib
import gzip
import json
import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
from etils import epath

from data.errors import DataError
from data.storage import write_atomically
from train.distributed.preemption import TRACE, Preemption
from train.distributed.processes import Cluster
from train.records import read_record
from train.run.directory import RunDir

log = logging.getLogger(__name__)

MARK = "longhaul steps"  # the trace event that spans all profiled steps
_LOOK_S = 2.0
_TRACE_SUFFIXES = ".xplane.pb", ".trace.json.gz"


def request_profile(run_dir: epath.Path, num_steps: int) -> str:
    """Ask the trainer of a run for a profile of `num_steps`; return the request's id.

    Raises:
        OSError: the request cannot be written.
    """
    request = {"id": uuid4().hex, "num_steps": num_steps}
    write_atomically(_request_file(run_dir), json.dumps(request))
    return request["id"]


def withdraw_request(run_dir: epath.Path) -> None:
    """Remove the request, unless the trainer has already removed it."""
    _request_file(run_dir).unlink(missing_ok=True)


def find_profile(run_dir: epath.Path, request_id: str) -> epath.Path | None:
    """Return the folder of a requested profile; None until the profile is complete."""
    profiles = run_dir / "profiles"
    for folder in profiles.iterdir() if profiles.exists() else ():
        file = folder / "profile.json"
        with contextlib.suppress(DataError):  # the record of another profile is damaged
            if (read_record(file, "") or {}).get("id") == request_id:
                return folder
    return None


def _request_file(run_dir: epath.Path) -> epath.Path:
    return run_dir / "profile_request.json"


class Profiler:
    """Traces the steps in `profile.steps` and on request."""

    def __init__(
        self,
        run: RunDir,
        cluster: Cluster,
        preemption: Preemption,
        text: Callable[[int], str],
        pause: Callable[[str], AbstractContextManager],
    ):
        """Remove old requests and start to poll for new ones, on process 0.

        `text` returns the HLO text of the compiled step that runs as a step number.
        `pause` excludes the time of its body from the step time (`LogWindow.pause`).
        """
        self._run = run
        self._cluster = cluster
        self._preemption = preemption
        self._text = text
        self._pause = pause
        self._first_step, self._last_step = run.config.profile.steps or (0, 0)
        self._newest_metrics: Any = None
        self._request_id: str | None = None
        self._trace_dir: Path | None = None  # set while tracing
        self._ended = threading.Event()
        if cluster.is_leader:
            withdraw_request(run.path)
            threading.Thread(target=self._poll, name="profile", daemon=True).start()

    def before(self, step: int) -> None:
        """Start to trace if this is the first step to profile."""
        num_steps = self._preemption.steps_to_trace(step - 1)
        if num_steps and self._trace_dir is None:
            self._first_step = step
            self._last_step = step + num_steps - 1
        if step == self._first_step and self._trace_dir is None:
            self._last_step = min(self._last_step, self._run.config.train.num_steps)
            with self._pause("profile"):
                self._begin()

    def after(self, step: int, metrics: Any) -> None:
        """End the trace after its last step, once the devices have finished it."""
        self._newest_metrics = metrics
        if self._trace_dir is not None and step == self._last_step:
            with self._pause("profile"):
                self._end()

    def close(self) -> None:
        """Stop looking for requests; an unfinished trace is lost."""
        self._ended.set()
        if self._trace_dir is not None:
            jax.profiler.stop_trace()
            shutil.rmtree(self._trace_dir, ignore_errors=True)

    def _poll(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                request = read_record(_request_file(self._run.path), "")
                if request is not None and self._trace_dir is None:
                    self._preemption.request(f"{TRACE}{int(request['num_steps'])}")
            except Exception as error:  # each store raises its own errors
                log.warning("profile_request.json cannot be answered: %s", error)
                self._ended.wait(60)

    def _begin(self) -> None:
        jax.block_until_ready(self._newest_metrics)  # no earlier step is in the trace
        if self._cluster.is_leader:
            self._take_request()
        # JAX traces to a local folder; with a path in an object store the process dies.
        self._trace_dir = Path(tempfile.mkdtemp())
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python calls would slow the steps
        jax.profiler.start_trace(str(self._trace_dir), profiler_options=options)
        self._annotation = jax.profiler.TraceAnnotation(MARK)
        self._annotation.__enter__()
        self._began = time.monotonic()

    def _take_request(self) -> None:
        """Read the request's id and remove its file, unless it has been withdrawn."""
        try:
            if request := read_record(_request_file(self._run.path), ""):
                self._request_id = request["id"]
                withdraw_request(self._run.path)
        except Exception as error:  # a failing store must not end the training
            log.warning("profile_request.json cannot be answered: %s", error)

    def _end(self) -> None:
        jax.block_until_ready(self._newest_metrics)
        seconds = time.monotonic() - self._began
        self._annotation.__exit__(None, None, None)
        jax.profiler.stop_trace()
        assert self._trace_dir is not None
        first = self._first_step
        last = self._last_step
        folder = self._run.path / "profiles" / str(first)
        try:
            try:
                self._keep(self._trace_dir, folder)
            finally:  # the other processes wait here, even if this one has failed
                self._cluster.wait(f"profile/{first}", self._cluster.timeout_s)
            if self._cluster.is_leader:
                record = {"first": first, "last": last, "seconds": seconds}
                record |= {"id": self._request_id, "processes": self._cluster.processes}
                text = gzip.compress(self._text(first).encode())
                write_atomically(folder / "step.hlo.gz", text)
                write_atomically(folder / "profile.json", json.dumps(record))
                log.info("steps %d to %d: %s", first, last, folder)
        except Exception as error:  # each store raises its own errors
            log.warning("%s was not written: %s", folder, error)
        shutil.rmtree(self._trace_dir, ignore_errors=True)
        self._trace_dir = None
        self._request_id = None

    def _keep(self, trace_dir: Path, folder: epath.Path) -> None:
        """Copy the traces to the run, under names that are unique to this process."""
        host = f"{socket.gethostname()}_{self._cluster.process}"
        target = folder / "plugins" / "profile" / str(self._first_step)
        for suffix in _TRACE_SUFFIXES:
            for trace in trace_dir.rglob(f"*{suffix}"):
                write_atomically(target / f"{host}{suffix}", trace.read_bytes())
