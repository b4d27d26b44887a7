"""The programs of a run whose batches change their shape (data/phases.py).

The next phase is compiled while the steps of a phase run, so that no step waits.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from data.phases import Phase, phase_at, phases_of
from train.config import Config
from train.core.program import Program
from train.errors import ConfigError

# A phase takes its value of the first key from the schedule at the second key.
_KEYS = {
    "data.batch_size": "data.batch_schedule",
    "data.sequence_length": "data.sequence_schedule",
}


class CompiledSteps(NamedTuple):
    """The compiled training step, and the step that also returns layer statistics.

    watched: None unless `log.numerics_interval_steps` is set (train/core/numerics.py).
    """

    plain: Any
    watched: Any | None


class PhaseSteps:
    """The compiled steps of each phase of a run."""

    def __init__(self, programs: Mapping[Phase, Program], last_batch: int):
        """Compile nothing yet.

        `programs` comes from `phase_programs`. Phases that begin after `last_batch` are
        not compiled ahead.
        """
        self.programs = programs
        self._phases = list(programs)
        self._last_batch = last_batch
        self._compilations = dict[Phase, Future[CompiledSteps]]()
        self._thread = ThreadPoolExecutor(1, "compile")

    def begin(self, batch: int) -> Future[CompiledSteps]:
        """Compile the steps of a batch's phase in a thread, unless that has begun.

        A start can load the state meanwhile, because compilation does not hold the GIL.
        """
        phase = phase_at(self._phases, batch)
        if phase not in self._compilations:
            future = self._thread.submit(_compile, self.programs[phase])
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


def _compile(program: Program) -> CompiledSteps:
    def compile_step(step: Any) -> Any:
        return step.lower(program.state, program.batch).compile()

    is_watched = program.config.log.numerics_interval_steps is not None
    plain = compile_step(program.train_step)
    watched = compile_step(program.watched_step) if is_watched else None
    return CompiledSteps(plain, watched)


def phase_programs(
    program: Program, make: Callable[[Config], Program]
) -> dict[Phase, Program]:
    """Return the program of each phase.

    Args:
        program: the program for batches of `data.batch_size` rows.
        make: returns the program of a config.

    Raises:
        ConfigError: the batches of a phase cannot be divided among the devices.
    """
    data = program.config.data
    programs = dict[Phase, Program]()
    for phase in phases_of(data):
        if (phase.rows, phase.length) == (data.batch_size, data.sequence_length):
            programs[phase] = program
            continue
        try:
            programs[phase] = make(_phase_config(program, phase))
        except ConfigError as error:
            suffix = f" (from batch {phase.first_batch:,} on)"
            mistakes = [
                m._replace(key=_KEYS.get(m.key, m.key), rule=m.rule + suffix)
                for m in error.mistakes
            ]
            raise ConfigError(mistakes) from error
    return programs


def _phase_config(program: Program, phase: Phase) -> Config:
    """Return the config of a phase.

    It has the fewest microbatches that divide its rows and have at most as many tokens
    as those of `program`. If there is no such number, the config is invalid.
    """
    config = program.config
    train = program.config.train
    shards = program.batch_shards.rows * program.pipeline.local_microbatches
    microbatch_tokens = program.tokens_per_step // train.accumulation_steps
    fewest = -(-phase.tokens_per_batch // microbatch_tokens)
    counts = range(fewest, phase.rows // shards + 1)
    accumulation = next((n for n in counts if phase.rows % (n * shards) == 0), fewest)
    return replace(
        config,
        data=replace(
            config.data,
            batch_size=phase.rows,
            sequence_length=phase.length,
            batch_schedule=[],
            sequence_schedule=[],
        ),
        schedule=replace(
            config.schedule.in_steps(config.data),
            base_batch_tokens=config.schedule.base_batch_tokens
            or program.tokens_per_step,
        ),
        train=replace(train, accumulation_steps=accumulation),
    )
