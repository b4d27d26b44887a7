"""The processes of a run, as the training loop sees them."""

from typing import Any

from train.core.program import Program
from train.core.services import SAVE
from train.core.state import TrainState
from train.distributed.fault_injection import FaultInjection
from train.distributed.preemption import Preemption
from train.distributed.processes import Cluster
from train.distributed.replicas import Finding, compare_replicas, make_checksums


class Peers:
    """Lets the loop act together with the other processes of the run."""

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        preemption: Preemption,
        compile_timeout_s: float,
        *,
        allow_faults: bool,
    ):
        """Read which fault to inject, if `allow_faults`."""
        self._program = program
        self._cluster = cluster
        self._preemption = preemption
        self._compile_timeout_s = compile_timeout_s
        self._faults = FaultInjection(cluster.process, allow_faults)
        self._compute_checksums: Any = None

    def wait_for_compilation(self) -> None:
        """Wait until every process has compiled the step.

        Processes that find the step in the compilation cache are ready early. Without
        this barrier, their watchdogs could fire while they wait for the others.
        """
        self._cluster.wait("compiled", self._compile_timeout_s)

    def step_done(self, step: int) -> str | int | None:
        """Record a completed step; return what is due: an exit code, SAVE or None."""
        return self._preemption.step_done(step)

    def request_save(self) -> None:
        """Ask all processes to save after the same step."""
        self._preemption.request(SAVE)

    def inject_fault(self, step: int, state: TrainState) -> TrainState:
        """Return the state after a step, with the fault of a drill if one is due."""
        return self._faults.after(step, state, self._program)

    def find_corruption(self, state: TrainState) -> list[Finding]:
        """Return the findings where replicas of an array are not bitwise equal."""
        program = self._program
        if self._compute_checksums is None:
            self._compute_checksums = make_checksums(program.state, program.mesh)
        if self._compute_checksums is None:  # No array is replicated.
            return []
        checksums = self._compute_checksums(state)
        return compare_replicas(checksums, program.state, program.mesh)
