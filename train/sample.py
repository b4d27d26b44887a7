"""`python -m train.sample run.dir=... prompt=...`: generate text from a checkpoint."""

from train.cli.command import run_command
from train.config import SampleConfig


def main(asked: SampleConfig) -> int:
    """Print prompt and continuation, samples separated by a line of dashes."""
    import jax

    from train.console import printable
    from train.generate import Sampling
    from train.load_run import load_run
    from train.results import sample_text

    program, sources, _, params = load_run(asked)
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
    run_command(main, "sample", SampleConfig)
