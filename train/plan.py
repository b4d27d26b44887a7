"""`python -m train.plan`: what training would do, without doing it."""

from train.command import run_command
from train.config import Config


def main(config: Config) -> int:
    """Print layout and cost; with `plan.array`, which device holds which slice."""
    from data.sources import encoding_of
    from data.tokenizer import padded_vocab_size
    from train.describe import describe, describe_array
    from train.program import make_program, settle
    from train.runtime import set_up

    set_up(config.runtime)
    encoding = encoding_of(config.data)
    program = make_program(
        settle(config, padded_vocab_size(encoding), encoding.n_vocab)
    )
    describe(program)
    if config.plan.array is not None:
        describe_array(program, config.plan.array)
    return 0


if __name__ == "__main__":
    run_command(main)
