"""Compare a run's mesh and kernels, print the verdict, and write prove.json."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace

import jax

from data.encoding import padded_vocab_size
from data.errors import DataError
from data.sources import encoding_of
from data.storage import write_atomically
from train.config import Config
from train.console import print_table
from train.errors import FINISHED, NOT_PROVED, ConfigError, Mistake
from train.execution import choose_execution
from train.identity import run_dir
from train.mesh import Device
from train.mesh_sizes import least_sizes
from train.program import settle
from train.prove.kernels import compare_kernels
from train.prove.parity import ArrayDifference, Reference
from train.prove.shrink import MAX_DEVICES, mesh_of, parts_of, shrink
from train.run.folder import run_folder
from train.run.versions import code_version, versions
from train.runtime import set_up


def prove(config: Config, as_json: bool) -> int:
    """Compare, print the result, write prove.json, and return the exit code.

    Raises:
        ConfigError: if there is nothing to compare, or the run's mesh cannot shrink.
        Exit: with NOT_PROVED if no parameter has a gradient.
    """
    cpus = _set_up(config)
    config = _settled(config)
    differences = list[ArrayDifference]()
    if jax.default_backend() != "cpu":
        sizes = least_sizes(config.mesh, jax.device_count())
        execution = choose_execution(config, jax.local_devices()[0], sizes)
        differences = compare_kernels(config, execution)
    small, changes, left_out = shrink(config, cpus[0])
    if not (parts_of(small) or differences):
        rule = "has only one device, so there is nothing to compare; set mesh.fsdp=2, "
        raise ConfigError([Mistake("mesh", "", f"{rule}for example")])
    # To optimize the small steps would take longer than to run them.
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.default_device(cpus[0]):
        reference = Reference(small, cpus)
        comparison = reference.compare(small)
    differences = [*comparison.differences, *differences]
    failures = [difference for difference in differences if difference.is_wrong]
    # The last difference of a quantity is the largest, or the most above its limit.
    ordered = sorted(differences, key=lambda d: (d.is_wrong, d.error))
    largest = {d.key.quantity: d for d in (*differences, *ordered)}.values()
    record = {
        "proved": not failures,
        "mesh": mesh_of(small),
        "cause": comparison.cause,
        "differences": [difference.as_json() for difference in failures],
        "largest": [difference.as_json() for difference in largest],
        "compared": len(differences),
        "no_gradient": reference.no_gradient,
        "changed": changes,
        "left_out": left_out,
        "versions": versions() | {"code": code_version()},
    }
    path = run_folder(run_dir(config)) / "prove.json"
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    if as_json:
        print(json.dumps(record))
        return NOT_PROVED if failures else FINISHED
    print(f"record      {path}")
    rows = [
        (key.quantity, f"{error:.1e}", f"{tolerance:g}", key.name)
        for key, error, tolerance in largest
    ]
    headers = ["compared", "difference", "at most", "largest in"]
    print_table(rows, headers, "relative differences from one device")
    for name in reference.no_gradient:
        print(f"unproved    {name} has no gradient")
    for sentence in left_out:
        print(f"left out    {sentence}")
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh_of(small).items())
    target = f"the mesh {axes}" if axes else "one device"
    if not failures:
        print(f"proved      The steps on {target} are those of one device.")
        return FINISHED
    print(f"not proved  The first difference on {target}: {failures[0]}.")
    if comparison.cause:
        print(f"cause       {' or '.join(comparison.cause)}")
    return NOT_PROVED


def _set_up(config: Config) -> Sequence[Device]:
    """Set up JAX, and return the virtual devices of the CPU."""
    set_up(replace(config.runtime, cpu_devices=MAX_DEVICES))
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms:
        jax.config.update("jax_platforms", f"{platforms},cpu")
    cpus = jax.devices("cpu")
    if len(cpus) < MAX_DEVICES:
        rule = "must not set the number of CPU devices; this command needs "
        flags, rule = os.environ.get("XLA_FLAGS", ""), f"{rule}{MAX_DEVICES}"
        raise ConfigError([Mistake("XLA_FLAGS", flags, rule)])
    return cpus


def _settled(config: Config) -> Config:
    """Return the config with its vocabulary size, which a tokenizer may not tell."""
    try:
        return settle(config, padded_vocab_size(encoding_of(config.data)))
    except DataError:  # There is no network, for example. Assume a large vocabulary.
        return settle(config, 2**15)
