"""`python -m train.export run.dir=... output=folder`: a run's model for others."""

from dataclasses import dataclass, field
from enum import StrEnum

from train.cli.command import run_command
from train.cli.rules import must_name_run
from train.config import Config, DistributedConfig, RunConfig, RuntimeConfig, Step
from train.errors import ConfigError, Mistake
from train.identity import run_dir


class ExportDtype(StrEnum):
    """Of the weights in the files."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True)
class ExportConfig:
    """Keys of `python -m train.export`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    output: str | None = None  # the folder to write, new or empty; also s3://, gs://
    step: Step | None = None  # of the checkpoint, or best; null: the newest
    dtype: ExportDtype | None = None  # of the weights; null: the parameters' own
    tokenizer: bool = True  # write the tokenizer too


def validate(config: ExportConfig) -> list[Mistake]:
    """List the mistakes: no run, or nowhere to write to."""
    rule = "must name the folder to write; set output=<folder>"
    missing = [] if config.output else [Mistake("output", None, rule)]
    return must_name_run(config) + missing


def main(asked: ExportConfig) -> int:
    """Write the weights, settings and tokenizer of a checkpoint for transformers.

    Several processes bring the weights together, and process 0 writes.

    Raises:
        ConfigError: if no family of models holds this one, the folder is not empty, or
            `tokenizers` is not installed.
        DataError: if the tokenizer cannot be written so that it gives the same ids.
    """
    import jax

    from train.distributed.processes import join
    from train.load_run import load_run
    from train.pretrained.families import family_of
    from train.pretrained.folder import empty_folder, write_folder
    from train.run.starts import read_run

    family_of(read_run(run_dir(Config(run=asked.run))).model)
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        rule = f'needs the package {error.name}; pip install -e ".[export]"'
        raise ConfigError([Mistake("output", asked.output, rule)]) from None
    folder = empty_folder(asked.output or "")
    leads = join(asked.distributed, lambda: None).is_leader
    program, sources, step, params = load_run(asked.run, asked.runtime, asked.step)
    with jax.set_mesh(program.mesh):
        dtype = asked.dtype or program.config.model.param_dtype
        written = write_folder(
            folder,
            program,
            params=params,
            sources=sources,
            step=step,
            dtype=str(dtype),
            with_tokenizer=asked.tokenizer,
        )
    if leads:
        print(f"exported    {folder}, step {step:,}: {written}")
    return 0


if __name__ == "__main__":
    run_command(main, "export", ExportConfig, validate)
