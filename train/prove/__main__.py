"""`python -m train.prove`: whether a run on its mesh is the run of one device.

The command takes the command line of a run. It shrinks the run's config, and compares
its step on virtual CPU devices with the same step on one of them. On an accelerator, it
also compares the kernels with plain formulas. It exits with 0 if everything agrees, and
with 5 otherwise.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Doc

from train.cli.command import run_command
from train.cli.rules import config_mistakes
from train.config import Config
from train.console import print_table
from train.errors import FINISHED, NOT_PROVED, ConfigError, Mistake
from train.identity import run_dir, training_config

if TYPE_CHECKING:
    from train.mesh import Device
    from train.prove.parity import ArrayDifference, Comparison


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
    import jax

    from data.storage import write_atomically
    from train.prove.parity import compare_with_one_device
    from train.prove.shrink import mesh_of, parts_of, shrink
    from train.run.folder import run_folder
    from train.run.versions import code_version, versions

    cpus = _set_up(config)
    settled = _settled(training_config(config))
    kernels = _compare_kernels(settled) if jax.default_backend() != "cpu" else []
    small, changes, left_out = shrink(settled, cpus[0])
    if not (parts_of(small) or kernels):
        rule = "has only one device, so there is nothing to compare; set mesh.fsdp=2, "
        raise ConfigError([Mistake("mesh", "", f"{rule}for example")])
    # To optimize the small steps would take longer than to run them.
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_device(cpus[0]):
        comparison = compare_with_one_device(small, cpus)
    differences = [*comparison.differences, *kernels]
    failures = [difference for difference in differences if difference.is_wrong]
    record = {
        "proved": not failures,
        "mesh": mesh_of(small),
        "cause": comparison.cause,
        "differences": [difference.as_json() for difference in failures],
        "largest": [entry.as_json() for entry in _most_different(differences)],
        "compared": len(differences),
        "no_gradient": comparison.no_gradient,
        "changed": changes,
        "left_out": left_out,
        "versions": versions() | {"code": code_version()},
    }
    path = run_folder(run_dir(settled)) / "prove.json"
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    if config.json:
        print(json.dumps(record))
    else:
        print(f"record      {path}")
        _print(differences, comparison, left_out, mesh_of(small))
    return NOT_PROVED if failures else FINISHED


def _print(
    differences: "list[ArrayDifference]",
    comparison: "Comparison",
    left_out: list[str],
    mesh: dict[str, int],
) -> None:
    """Print the largest differences, what was left out, and the verdict."""
    rows = [
        (d.key.quantity, f"{d.error:.1e}", f"{d.tolerance:g}", d.key.name)
        for d in _most_different(differences)
    ]
    headers = ["compared", "difference", "at most", "largest in"]
    print_table(rows, headers, "relative differences from one device")
    for name in comparison.no_gradient:
        print(f"unproved    {name} has no gradient")
    for sentence in left_out:
        print(f"left out    {sentence}")
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    target = f"the mesh {axes}" if mesh else "one device"
    failures = [difference for difference in differences if difference.is_wrong]
    if not failures:
        print(f"proved      The steps on {target} are those of one device.")
        return
    print(f"not proved  The first difference on {target}: {failures[0]}.")
    if comparison.cause:
        print(f"cause       {' or '.join(comparison.cause)}")


def _set_up(config: Config) -> "Sequence[Device]":
    """Set up JAX, and return the virtual devices of the CPU."""
    import jax

    from train.prove.shrink import MAX_DEVICES
    from train.runtime import set_up

    set_up(replace(config.runtime, cpu_devices=MAX_DEVICES))
    platforms: Any = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms:
        jax.config.update("jax_platforms", f"{platforms},cpu")
    cpus = jax.devices("cpu")
    if len(cpus) < MAX_DEVICES:
        rule = (
            f"must not set the number of CPU devices; this command needs {MAX_DEVICES}"
        )
        raise ConfigError([Mistake("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""), rule)])
    return cpus


def _settled(config: Config) -> Config:
    """Return the config with its vocabulary size, which a tokenizer may not tell."""
    from data.encoding import padded_vocab_size
    from data.errors import DataError
    from data.sources import encoding_of
    from train.program import settle

    try:
        return settle(config, padded_vocab_size(encoding_of(config.data)))
    except DataError:  # There is no network, for example. Assume a large vocabulary.
        return settle(config, 2**15)


def _compare_kernels(config: Config) -> "list[ArrayDifference]":
    """Compare the kernels that the run has on this machine's accelerator."""
    import jax

    from train.execution import choose_execution
    from train.mesh_sizes import least_sizes
    from train.prove.kernels import compare_kernels

    device, sizes = jax.local_devices()[0], least_sizes(config.mesh, jax.device_count())
    return compare_kernels(config, choose_execution(config, device, sizes), device)


def _most_different(differences: "list[ArrayDifference]") -> "list[ArrayDifference]":
    """Return, for each quantity, the difference that is the most above its limit."""
    largest = dict[str, Any]()
    for new in differences:
        old = largest.setdefault(new.key.quantity, new)
        if (new.is_wrong, new.error) > (old.is_wrong, old.error):
            largest[new.key.quantity] = new
    return [*largest.values()]


if __name__ == "__main__":
    run_command(main, "prove", ProveConfig, prove_mistakes)
