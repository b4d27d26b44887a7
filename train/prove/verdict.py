"""Compare a run's mesh and kernels, print the verdict, and write prove.json."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax

from data.config import DataConfig
from data.encoding import padded_vocab_size
from data.errors import DataError, Mistake
from data.sources import encoding_of
from data.storage import write_atomically
from train.config import Config, RuntimeConfig
from train.console import print_table
from train.errors import FINISHED, NOT_PROVED, ConfigError
from train.identity import run_dir
from train.prove.divided_step import DividedStep
from train.prove.kernels import compare_kernels
from train.prove.parity import ArrayDifference, Comparison, Reference
from train.prove.shrink import MAX_DEVICES, shrink
from train.resolve.execution import ExecutionChoice
from train.resolve.mesh import Device
from train.resolve.mesh_sizes import least_sizes
from train.resolve.program import settle
from train.run.folder import run_folder
from train.run.versions import code_version, versions
from train.runtime import set_up


def prove(config: Config, as_json: bool) -> int:
    """Compare, print the result, write prove.json, and return the exit code.

    Raises:
        ConfigError: if there is nothing to compare, or the run's mesh cannot shrink.
        Exit: with NOT_PROVED if no parameter has a gradient.
    """
    cpus = _set_up(config.runtime)
    config = settle(config, _vocab_size(config.data))
    kernels = list[ArrayDifference]()
    if jax.default_backend() != "cpu":
        sizes = least_sizes(config.mesh, jax.device_count())
        execution = ExecutionChoice(config, jax.local_devices()[0], sizes).execution()
        kernels = compare_kernels(config.model, config.data, execution)
    shrunk = shrink(config, cpus[0])
    step = DividedStep(shrunk.config)
    if not (step.parts or kernels):
        rule = "has only one device, so there is nothing to compare; set mesh.fsdp=2, "
        raise ConfigError([Mistake("mesh", "", f"{rule}for example")])
    # Optimizing the small steps would take longer than running them.
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_device(cpus[0]):
        reference = Reference(step, cpus)
        comparison = reference.compare(step)
    result = comparison._replace(differences=[*comparison.differences, *kernels])
    record = {
        "proved": not result.failures,
        "mesh": step.mesh,
        "cause": result.cause,
        "differences": [difference.as_json() for difference in result.failures],
        "largest": [difference.as_json() for difference in _largest(result)],
        "compared": len(result.differences),
        "no_gradient": reference.no_gradient,
        "changed": shrunk.changes,
        "left_out": shrunk.left_out,
        "versions": versions() | {"code": code_version()},
    }
    path = run_folder(run_dir(config)) / "prove.json"
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    if as_json:
        print(json.dumps(record))
    else:
        print(f"record      {path}")
        _print_verdict(result, reference, step=step, left_out=shrunk.left_out)
    return NOT_PROVED if result.failures else FINISHED


def _print_verdict(
    result: Comparison,
    reference: Reference,
    *,
    step: DividedStep,
    left_out: Iterable[str],
) -> None:
    rows = [
        (key.quantity, f"{error:.1e}", f"{tolerance:g}", key.name)
        for key, error, tolerance in _largest(result)
    ]
    headers = ["compared", "difference", "at most", "largest in"]
    print_table(rows, headers, "relative differences from one device")
    for name in reference.no_gradient:
        print(f"unproved    {name} has no gradient")
    for sentence in left_out:
        print(f"left out    {sentence}")
    axes = " x ".join(f"{axis} {n}" for axis, n in step.mesh.items())
    target = f"the mesh {axes}" if axes else "one device"
    if not result.failures:
        print(f"proved      The steps on {target} are those of one device.")
        return
    print(f"not proved  The first difference on {target}: {result.failures[0]}.")
    if result.cause:
        print(f"cause       {' or '.join(result.cause)}")


def _largest(result: Comparison) -> Iterable[ArrayDifference]:
    """Return the largest difference of each quantity, or the largest wrong one."""
    ordered = sorted(result.differences, key=lambda d: (d.is_wrong, d.error))
    # A later entry replaces the value of a key, but keeps its place.
    return {d.key.quantity: d for d in (*result.differences, *ordered)}.values()


def _set_up(runtime: RuntimeConfig) -> Sequence[Device]:
    """Set up JAX, and return the virtual devices of the CPU."""
    set_up(replace(runtime, cpu_devices=MAX_DEVICES))
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms:
        jax.config.update("jax_platforms", f"{platforms},cpu")
    cpus = jax.devices("cpu")
    if len(cpus) < MAX_DEVICES:
        flags = os.environ.get("XLA_FLAGS", "")
        rule = f"must not set the number of CPU devices, which must be {MAX_DEVICES}"
        raise ConfigError([Mistake("XLA_FLAGS", flags, rule)])
    return cpus


def _vocab_size(data: DataConfig) -> int:
    """Return the tokenizer's padded vocabulary size, or a large one."""
    try:
        return padded_vocab_size(encoding_of(data))
    except DataError:  # The tokenizer may need a network that is not available.
        return 2**15
