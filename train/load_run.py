"""A run's own model, brought back from its checkpoints: for commands on a run."""

from dataclasses import replace
from typing import Any

from data.sources import Sources, open_sources
from train.config import Config, EvaluateConfig, SampleConfig
from train.identity import run_dir
from train.program import Program, make_program
from train.run.checkpoint import Checkpoints
from train.run.directory import check_data, read_run
from train.run.storage import run_folder
from train.runtime import set_up


def load_trained(
    asked: EvaluateConfig | SampleConfig, batch_size: int | None = None
) -> tuple[Program, Sources, int, Any]:
    """Build a run's program on this machine and restore its weights.

    Args:
        asked: run, step and machine; model, data and tokenizer are the run's own.
        batch_size: instead of the run's.

    Returns:
        The program, the tokens, the step, and the parameters (the average of weights
        where one is kept), sharded.

    Raises:
        ConfigError: if there is no such run.
        DataError: if the text is not the run's, or the checkpoint cannot be read.
    """
    directory = asked.run.dir
    if directory is None and asked.run.name:
        directory = run_dir(Config(run=asked.run))
    config = read_run(directory)
    config = replace(config, runtime=asked.runtime)
    if batch_size is not None:
        data = replace(config.data, batch_size=batch_size)
        train = replace(config.train, accumulation_steps=1)
        config = replace(config, data=data, train=train)
    set_up(config.runtime)
    sources = open_sources(config.data)
    path = run_folder(directory or "")
    check_data(path, sources)
    program = make_program(config)
    checkpoints = Checkpoints(path / "checkpoints", config.checkpoint, read_only=True)
    step, params = checkpoints.restore_params(program.state, asked.step)
    return program, sources, step, params
