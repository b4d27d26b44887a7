"""The programs of a run whose batches change their shape (data/phases.py).

The next phase is compiled while the steps of a phase run, so that no step waits.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from data.phases import Phase, phase_at
from train.core.program import Program


class CompiledSteps(NamedTuple):
    """The compiled training step, and the step that also returns layer statistics.

    watched: None unless `log.numerics_interval_steps` is set (train/core/numerics.py).
    """

    plain: Any
    watched: Any | None


class PhaseSteps:
    """The compiled steps of each phase of a run."""

    def __init__(
        self, programs: Mapping[Phase, Program], last_batch: int, is_watched: bool
    ):
        """Compile nothing yet.

        `programs` comes from `phase_programs`. Phases that begin after `last_batch` are
        not compiled ahead. `is_watched` tells whether watched steps are needed.
        """
        self.programs = programs
        self._phases = list(programs)
        self._last_batch = last_batch
        self._is_watched = is_watched
        self._compilations = dict[Phase, Future[CompiledSteps]]()
        self._thread = ThreadPoolExecutor(1, "compile")

    def begin(self, batch: int) -> Future[CompiledSteps]:
        """Compile the steps of a batch's phase in a thread, unless that has begun.

        A start can load the state meanwhile, because compilation does not hold the GIL.
        """
        phase = phase_at(self._phases, batch)
        if phase not in self._compilations:
            future = self._thread.submit(self._compile, self.programs[phase])
            self._compilations[phase] = future
        return self._compilations[phase]

    def get(self, batch: int) -> CompiledSteps:
        """Wait for the compiled steps of a batch's phase, and return them.

        The compilation of the next phase then begins.
        """
        steps = self.begin(batch).result()
        for phase in self._phases:
            if batch < phase.first_batch <= self._last_batch:
                self.begin(phase.first_batch)
                break
        return steps

    def _compile(self, program: Program) -> CompiledSteps:
        def compile_step(step: Any) -> Any:
            return step.lower(program.state, program.batch).compile()

        plain = compile_step(program.train_step)
        watched = compile_step(program.watched_step) if self._is_watched else None
        return CompiledSteps(plain, watched)
