"""Say what will happen before it does: devices, layout, cost of a step."""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from data.batches import Order
from model.params import ParamInfo, named
from train.chips import peak_flops
from train.config import ConfigError, Mistake
from train.program import Program
from train.progress import format_bytes, format_count, print_table
from train.sharding import num_shards


def describe(program: Program) -> None:
    """Print devices, mesh, the table of parameters, tokens and FLOPs per step."""
    config, how = program.config, program.how
    devices = program.mesh.devices
    sizes = " x ".join(f"{k} {v}" for k, v in program.mesh.shape.items() if v > 1)
    first = devices.flat[0]
    peak = peak_flops(first.device_kind)
    known = (
        f"peak {format_count(peak)}FLOP/s each" if peak else "peak not known: no MFU"
    )
    print(
        f"devices     {devices.size} x {first.device_kind} ({first.platform}), {known}"
    )
    print(f"mesh        {sizes or 'one device'}")
    print_table(
        _rows(program),
        ["parameter", "shape", "dtype", "logical axes", "spec", "bytes/device"],
        "parameters",
    )
    params = jax.tree.leaves(program.state.params)
    count = sum(leaf.size for leaf in params)
    state = sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(program.state))
    print(f"parameters  {count:,}")
    print(f"state       {format_bytes(state)} a device, with optimizer")
    print(f"attention   {how.attention}, products in {how.compute_dtype}")
    rows, length = config.data.batch_size, config.data.sequence_length
    print(f"step        {rows} rows x {length} = {program.tokens_per_step:,} tokens")
    flops = format_count(program.flops_per_step)
    print(f"            {flops} model FLOPs (6 N + 12 L C T per token)")
    print(f"steps       {config.train.num_steps:,}", flush=True)


def describe_data(order: Order, num_steps: int) -> None:
    """Print what each source gives in the whole run."""
    used = order.epochs(num_steps)
    for number, (name, rows) in enumerate(zip(order.names, order.rows, strict=True)):
        title = "" if number else "data"
        print(f"{title:<11} {name}: {len(rows):,} rows, used {used[name]:.2f} times")


def _rows(program: Program) -> list[list[str]]:
    infos = dict(named(program.infos, lambda x: isinstance(x, ParamInfo)))
    return [
        [
            name,
            "x".join(map(str, leaf.shape)),
            str(leaf.dtype),
            " ".join(infos[name].axes),
            str(tuple(leaf.sharding.spec)),
            format_bytes(bytes_per_device(leaf)),
        ]
        for name, leaf in named(program.state.params)
    ]


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Count the bytes of an array that one device holds."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    parts = math.prod(num_shards(sharding.mesh, entry) for entry in sharding.spec)
    return leaf.size * leaf.dtype.itemsize // parts


def describe_array(program: Program, wanted: str) -> None:
    """Print which device holds which slice of a parameter.

    Raises:
        ConfigError: if there is no such parameter.
    """
    arrays = dict(named(program.state.params))
    if wanted not in arrays:
        rule = "must be one of: " + ", ".join(arrays)
        raise ConfigError([Mistake("plan.array", wanted, rule)])
    leaf = arrays[wanted]
    places = {device: index for index, device in np.ndenumerate(program.mesh.devices)}
    rows = [
        [
            str(device),
            " ".join(
                f"{axis}={at}"
                for axis, at in zip(
                    program.mesh.axis_names, places[device], strict=True
                )
                if program.mesh.shape[axis] > 1
            ),
            "["
            + ", ".join(_span(s, n) for s, n in zip(index, leaf.shape, strict=True))
            + "]",
        ]
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
    ]
    shape = "x".join(map(str, leaf.shape))
    title = f"{wanted} {shape} {leaf.dtype}, {tuple(leaf.sharding.spec)}"
    print_table(rows, ["device", "mesh position", "holds"], title)


def _span(part: slice, size: int) -> str:
    start, stop, _ = part.indices(size)
    return f"{start}:{stop}"
