"""`python -m train.prove`: whether a run on its mesh is the run of one device.

The command takes the command line of a run. It shrinks the run's config, and compares
its step on virtual CPU devices with the same step on one of them. On an accelerator, it
also compares the kernels with plain formulas. It exits with 0 if everything agrees, and
with 5 otherwise.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Doc

from train.cli.command import run_command
from train.cli.rules import config_mistakes
from train.config import Config
from train.errors import FINISHED, NOT_PROVED, ConfigError, Mistake
from train.identity import run_dir, training_config

if TYPE_CHECKING:
    from train.mesh import Device
    from train.prove.parity import Comparison, Difference
    from train.prove.shrink import Shrunk


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

    from train.prove.parity import compare_with_one_device
    from train.prove.shrink import mesh_of, shrink

    cpus = _set_up(config)
    settled = _settled(training_config(config))
    kernels = _compare_kernels(settled) if jax.default_backend() != "cpu" else []
    shrunk = shrink(settled, cpus[0])
    mesh = mesh_of(shrunk.config)
    if not (mesh or kernels):
        rule = "has only one device, so there is nothing to compare; set mesh.fsdp=2, "
        raise ConfigError([Mistake("mesh", "", f"{rule}for example")])
    print(f"proving     {_mesh_text(mesh)}", file=sys.stderr)
    # Optimization would take longer than the small steps.
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_device(cpus[0]):
        comparison = compare_with_one_device(shrunk.config, cpus)
    differences = [*comparison.differences, *kernels]
    record = _record(differences, comparison, shrunk)
    path = _write(settled, record)
    if config.json:
        print(json.dumps(record))
    else:
        _print(differences, comparison, shrunk)
        print(f"record      {path}")
    return FINISHED if record["proved"] else NOT_PROVED


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
        rule = "must leave the number of CPU devices to this command, which needs "
        rule += f"{MAX_DEVICES}; remove --xla_force_host_platform_device_count"
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
    except DataError:  # No network, for example. A large vocabulary stands for it.
        return settle(config, 2**15)


def _compare_kernels(config: Config) -> "list[Difference]":
    """Compare the kernels that the run has on this machine's accelerator."""
    import jax

    from train.execution import choose_execution
    from train.mesh_sizes import least_sizes
    from train.prove.kernels import compare_kernels

    device, sizes = jax.local_devices()[0], least_sizes(config.mesh, jax.device_count())
    return compare_kernels(config, choose_execution(config, device, sizes), device)


def _record(
    differences: "list[Difference]", comparison: "Comparison", shrunk: "Shrunk"
) -> dict[str, Any]:
    """Return the values of prove.json."""
    from train.prove.shrink import mesh_of
    from train.run.versions import code_version, versions

    wrong = [_as_json(difference) for difference in differences if difference.is_wrong]
    return {
        "proved": not wrong,
        "mesh": mesh_of(shrunk.config),
        "axes": comparison.axes,
        "differences": wrong,
        "largest": [_as_json(largest) for _, largest in _summary(differences)],
        "compared": len(differences),
        "no_gradient": comparison.no_gradient,
        "changed": shrunk.changes,
        "left_out": shrunk.left_out,
        "versions": versions() | {"code": code_version()},
    }


def _as_json(difference: "Difference") -> dict[str, Any]:
    key, error, tolerance = difference
    finite_error = error if error < float("inf") else None  # JSON has no NaN
    return {**key._asdict(), "error": finite_error, "tolerance": tolerance}


def _summary(
    differences: "list[Difference]",
) -> "list[tuple[list[Difference], Difference]]":
    """Return the differences of each quantity, and the one that is most wrong."""
    groups = dict[str, list[Any]]()
    for difference in differences:
        groups.setdefault(difference.key.quantity, []).append(difference)

    def badness(difference: "Difference") -> tuple[bool, float]:
        return difference.is_wrong, difference.error

    return [(group, max(group, key=badness)) for group in groups.values()]


def _print(
    differences: "list[Difference]", comparison: "Comparison", shrunk: "Shrunk"
) -> None:
    """Print a table of the differences, what was left out, and the verdict."""
    from train.console import print_table
    from train.prove.shrink import mesh_of

    rows = [
        (
            quantity.key.quantity,
            len(group),
            f"{quantity.error:.1e}",
            f"{quantity.tolerance:g}",
            quantity.key.name,
        )
        for group, quantity in _summary(differences)
    ]
    headers = ["compared", "arrays", "difference", "at most", "largest in"]
    print_table(rows, headers, "relative differences from one device")
    for name in comparison.no_gradient:
        print(f"unproved    {name} has no gradient")
    for sentence in shrunk.left_out:
        print(f"left out    {sentence}")
    wrong = [difference for difference in differences if difference.is_wrong]
    mesh = _mesh_text(mesh_of(shrunk.config))
    if not wrong:
        print(f"proved      The steps on {mesh} are those of one device.")
        return
    first = wrong[0]
    text = f"The first difference is the {first.key}: {first.error:.2g}, at most "
    text += f"{first.tolerance:g}."
    if comparison.axes:
        axes = " or ".join(f"mesh.{axis}" for axis in comparison.axes)
        text += f" The cause is the axis {axes}."
    print(f"not proved  {text}")


def _mesh_text(mesh: dict[str, int]) -> str:
    return "mesh " + (
        " x ".join(f"{k} {n}" for k, n in mesh.items()) or "of one device"
    )


def _write(config: Config, record: dict[str, Any]) -> str:
    """Write prove.json into the run's directory, and return its path."""
    from data.storage import write_atomically
    from train.run.folder import run_folder

    path = run_folder(run_dir(config)) / "prove.json"
    write_atomically(path, json.dumps(record, indent=1, default=str) + "\n")
    return os.fspath(path)


if __name__ == "__main__":
    run_command(main, "prove", ProveConfig, prove_mistakes)
