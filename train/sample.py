"""`python -m train.sample run.dir=... prompt=...`: generate text from a checkpoint."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt, Le

from train.cli.command import run_command
from train.cli.rules import must_name_run
from train.config import Count, NotNegative, RunConfig, RuntimeConfig, Step


@dataclass(frozen=True)
class SampleConfig:
    """Keys of `python -m train.sample`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    step: Step | None = None  # of the checkpoint, or best; null: the newest
    prompt: str = ""  # text to go on from
    num_tokens: Count = 256  # to generate
    temperature: NotNegative = 0.8  # 0: always the likeliest token
    top_k: Count | None = None  # draw from the k likeliest tokens only; null: from all
    # Draw from the likeliest that make up this part of all chances; null: from all.
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    num_samples: Count = 1  # continuations, each drawn anew
    seed: int = 0  # of the draws


def main(asked: SampleConfig) -> int:
    """Print prompt and continuation, samples separated by a line of dashes."""
    import jax

    from train.console import printable
    from train.generate import Sampling
    from train.load_run import load_run
    from train.results import sample_text

    program, sources, _, params = load_run(asked.run, asked.runtime, asked.step)
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    with jax.set_mesh(program.mesh):
        texts = sample_text(
            program,
            params,
            sources,
            asked.prompt,
            asked.num_tokens,
            sampling,
            asked.seed,
            asked.num_samples,
        )
    print(f"\n{'-' * 72}\n".join(map(printable, texts)))
    return 0


if __name__ == "__main__":
    run_command(main, "sample", SampleConfig, must_name_run)
