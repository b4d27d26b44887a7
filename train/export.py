"""`python -m train.export run.dir=... output=folder`: write a Hugging Face model."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from typing_extensions import Doc

from data.errors import Mistake
from train.cli.command import Command, run_command
from train.cli.rules import must_name_run
from train.config import Config, DistributedConfig, RunConfig, RuntimeConfig, Step
from train.errors import ConfigError, writing
from train.identity import run_dir


class ExportDtype(StrEnum):
    """The dtype of the exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True)
class ExportConfig:
    """Keys of `python -m train.export`; other settings come from the run's config."""

    run_schema = Config  # A catalog replaces it by a dataclass with added parts.

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    output: Annotated[
        str | None, Doc("The folder to write, new or empty; also s3:// or gs://.")
    ] = None
    step: Annotated[
        Step | None, Doc("The step of the checkpoint, or best. null: the newest.")
    ] = None
    dtype: Annotated[
        ExportDtype | None,
        Doc("The dtype of the weights. null: the dtype of the parameters."),
    ] = None
    tokenizer: Annotated[bool, Doc("Write the tokenizer too.")] = True
    family: Annotated[
        str | None,
        Doc(
            "The model_type in transformers of the written folder, such as "
            "qwen3_5_moe_text. null: the first family that has the model's settings."
        ),
    ] = None


def export_mistakes(config: ExportConfig) -> list[Mistake]:
    """Return a mistake if no run is named, and one if no output folder is named."""
    rule = "must name the folder to write; set output=<folder>"
    mistakes = [] if config.output else [Mistake("output", None, rule)]
    return must_name_run(config) + mistakes


def main(config: ExportConfig) -> int:
    """Write the weights, settings and tokenizer of a checkpoint for transformers.

    Raises:
        ConfigError: if no model family of transformers has the run's settings, the
            folder is not empty, or `tokenizers` is not installed.
        DataError: if the exported tokenizer returns other ids than the run's tokenizer.
    """
    from train.distributed.joining import join
    from train.load_run import load_run
    from train.pretrained.families import family_of
    from train.pretrained.folder import require_empty_folder, write_folder
    from train.run.starts import read_run

    model = read_run(run_dir(Config(run=config.run)), schema=config.run_schema).model
    family_of(model, config.family)
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        rule = f'needs the package {error.name}; pip install -e ".[export]"'
        raise ConfigError([Mistake("output", config.output, rule)]) from None
    with writing("output", config.output):
        folder = require_empty_folder(config.output or "")
    run = run_dir(Config(run=config.run))
    is_leader = join(config.distributed, run, lambda: None).is_leader
    program, sources, step, params = load_run(
        config.run, config.runtime, config.step, schema=config.run_schema
    )
    # Several processes gather the weights, and process 0 writes them.
    with writing("output", folder):
        summary = write_folder(
            folder,
            program,
            params,
            sources,
            step,
            dtype=str(config.dtype or program.config.model.param_dtype),
            with_tokenizer=config.tokenizer,
            family_name=config.family,
        )
    if is_leader:
        print(f"exported    {folder}, step {step:,}: {summary}")
    return 0


COMMAND = Command(main, "export", ExportConfig, export_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
