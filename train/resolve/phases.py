"""Make the programs of a run whose batches change their shape (data/phases.py)."""

from collections.abc import Callable
from dataclasses import replace

from data.phases import Phase, phases_of
from train.config import Config
from train.errors import ConfigError
from train.resolve.program import ConfiguredProgram

# A phase takes its value of the first key from the schedule at the second key.
_KEYS = {
    "data.batch_size": "data.batch_schedule",
    "data.sequence_length": "data.sequence_schedule",
}


def phase_programs(
    program: ConfiguredProgram, make: Callable[[Config], ConfiguredProgram]
) -> dict[Phase, ConfiguredProgram]:
    """Return the program of each phase.

    Args:
        program: the program for batches of `data.batch_size` rows.
        make: returns the program of a config.

    Raises:
        ConfigError: the batches of a phase cannot be divided among the devices.
    """
    data = program.config.data
    programs = dict[Phase, ConfiguredProgram]()
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


def _phase_config(program: ConfiguredProgram, phase: Phase) -> Config:
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
