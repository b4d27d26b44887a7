"""`python -m train.coordinates`: whether learning rates can transfer between sizes.

The command takes the command line of a run. It trains models of several widths and
depths for a few steps, and compares how large activations are and how much they change.
It exits with 0 if neither depends on the size, and with 5 otherwise.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated

from typing_extensions import Doc

from data.config import Count
from data.errors import Mistake
from train.cli.command import Command, run_command
from train.cli.rules import config_mistakes
from train.config import Config


@dataclass(frozen=True)
class CoordinatesConfig(Config):
    """Keys of `python -m train.coordinates`, in addition to those of training."""

    widths: Annotated[list[Count], Doc("Ascending values of model.embed_dim.")] = field(
        default_factory=lambda: [64, 128, 256, 512, 1024]
    )
    depths: Annotated[list[Count], Doc("Ascending values of model.num_layers.")] = (
        field(default_factory=lambda: [2, 4, 8, 16, 32])
    )
    steps: Annotated[Count, Doc("The number of updates of each model.")] = 4
    output: Annotated[str, Doc("The page with the curves.")] = "coordinates.html"


def coordinates_mistakes(config: CoordinatesConfig) -> list[Mistake]:
    """Return the mistakes of a config, including sizes that cannot be compared."""
    mistakes = config_mistakes(config)
    model = config.model
    for key, sizes in (("widths", config.widths), ("depths", config.depths)):
        if sorted({*sizes}) != sizes or len(sizes) == 1:
            mistakes.append(Mistake(key, sizes, "must be [] or two or more, ascending"))
    unit = model.embed_dim // math.gcd(model.embed_dim, model.num_heads)
    if wrong := [width for width in config.widths if width % unit]:
        rule = f"must be multiples of {unit}, because the number of heads grows with "
        rule += "the width and their dims stay; change model.num_heads, or these widths"
        mistakes.append(Mistake("widths", wrong, rule, ("model.num_heads",)))
    return mistakes


def main(config: CoordinatesConfig) -> int:
    """Train the models, print and draw the result, and return the exit code."""
    from data.encoding import padded_vocab_size
    from data.sources import encoding_of
    from train.coordinates.growth import compare_sizes
    from train.coordinates.measure import ModelFamily
    from train.resolve.program import settle
    from train.runtime import set_up

    set_up(config.runtime)
    vocab_size = padded_vocab_size(encoding_of(config.data))
    family = ModelFamily(settle(config.plain(), vocab_size))
    sizes = {"width": config.widths, "depth": config.depths}
    return compare_sizes(family, sizes, steps=config.steps, output=config.output)


COMMAND = Command(main, "coordinates", CoordinatesConfig, coordinates_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
