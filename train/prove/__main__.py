"""`python -m train.prove`: whether a run on its mesh is the run of one device.

The command takes the command line of a run. It shrinks the run's config, and compares
its step on virtual CPU devices with the same step on one of them. On an accelerator, it
also compares the kernels with plain formulas. It exits with 0 if everything agrees, and
with 5 otherwise.
"""

from dataclasses import dataclass
from typing import Annotated

from typing_extensions import Doc

from data.errors import Mistake
from train.cli.command import Command, run_command
from train.cli.rules import config_mistakes
from train.config import Config


@dataclass(frozen=True)
class ProveConfig(Config):
    """Keys of `python -m train.prove`, in addition to those of training."""

    json: Annotated[bool, Doc("Print the record as JSON, for programs.")] = False


def prove_mistakes(config: ProveConfig) -> list[Mistake]:
    """Return the mistakes of a config, including a mesh without sizes."""
    mistakes = config_mistakes(config)
    if config.mesh.planned:
        rule = "has no sizes of mesh axes yet; give those that python -m train.plan "
        mistakes.append(Mistake("mesh.planned", True, f"{rule}chose, as mesh.fsdp=8"))
    return mistakes


def main(config: ProveConfig) -> int:
    """Compare, print the result, write prove.json, and return the exit code."""
    from train.prove.verdict import prove

    return prove(config.plain(), as_json=config.json)


COMMAND = Command(main, "prove", ProveConfig, prove_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
