"""The device mesh: named axes, from the slowest network to the fastest."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from data.errors import Mistake
from train.config import MESH_AXES, MeshConfig
from train.errors import ConfigError, check_all
from train.resolve.mesh_sizes import axis_sizes, least_sizes

Device = Any  # The stubs of JAX declare jax.Device as a variable.


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Return the mesh, laid out so that fast networks carry as many axes as possible.

    Axes with `mesh.dcn` factors cross slices. Without slices they cross processes, or
    equal blocks of one process' devices, so that one machine can try a layout. On
    TPUs, neighbours along fsdp are in different slices: gradients are first scattered
    within each slice, which minimises the bytes sent between slices (model/gather.py).

    Raises:
        ConfigError: if sizes and devices do not fit together; lists all mistakes.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes, granules = check_all(
        lambda: axis_sizes(config, len(devices)), lambda: _dcn_granules(config, devices)
    )
    dcn = [getattr(config.dcn, axis) for axis in MESH_AXES]
    slice_sizes = [sizes[axis] // dcn[i] for i, axis in enumerate(MESH_AXES)]
    blocks = [_device_grid(slice_sizes, granule) for granule in granules]
    grid = np.array(blocks).reshape(*dcn, *slice_sizes)
    rank = len(MESH_AXES)
    # The dims of `grid` for each axis: between slices, and within a slice.
    order = np.arange(2 * rank).reshape(2, rank).T
    if devices[0].platform == "tpu":
        fsdp = MESH_AXES.index("fsdp")
        order[fsdp] = order[fsdp, ::-1]
    grid = grid.transpose(order.ravel()).reshape(*sizes.values())
    # Auto: shardings are hints to XLA's partitioner, not part of every array's type.
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * rank)


def _dcn_granules(config: MeshConfig, devices: list[Device]) -> list[list[Device]]:
    """Return the devices of each slice, process or block, or raise ConfigError."""
    sizes = least_sizes(config, len(devices))
    sizes_fit = math.prod(sizes.values()) == len(devices)
    dcn = {axis: getattr(config.dcn, axis) for axis in MESH_AXES}
    mistakes = [
        Mistake(f"mesh.dcn.{axis}", dcn[axis], f"must divide mesh.{axis}={size}")
        for axis, size in sizes.items()
        if size % dcn[axis] and (sizes_fit or getattr(config, axis) != -1)
    ]
    granules = _granules(devices, math.prod(dcn.values()))
    if len(granules) != math.prod(dcn.values()):
        rule = (
            f"must multiply to the number of slices (or hosts), {len(granules)}; set "
            f"mesh.dcn.data={len(granules)}, and mesh.data to a multiple of it"
        )
        factors = " x ".join(f"{axis} {factor}" for axis, factor in dcn.items())
        mistakes.append(Mistake("mesh.dcn", factors, rule))
    if mistakes:
        raise ConfigError(mistakes)
    return granules


def _device_grid(sizes: list[int], devices: list[Device]) -> np.ndarray:
    """Arrange a slice's devices in a grid, along whole dims of a torus if possible."""
    create = mesh_utils.create_device_mesh
    try:
        return create(sizes, devices)
    except NotImplementedError:
        return create(sizes, devices, allow_split_physical_axes=True)


def _granules(devices: list[Device], num_blocks: int) -> list[list[Device]]:
    """Group devices by slice, by process, or into `num_blocks` equal blocks."""

    def group_by(key: Callable[[Device], int]) -> list[list[Device]]:
        return [list(g) for _, g in groupby(sorted(devices, key=key), key=key)]

    slices = group_by(lambda device: getattr(device, "slice_index", 0))
    # Keep TPU slices separate: only axes with a `mesh.dcn` factor may cross slices.
    if num_blocks == 1 and not (len(slices) > 1 and devices[0].platform == "tpu"):
        return [devices]
    for groups in (slices, group_by(lambda device: device.process_index)):
        if len(groups) > 1:
            return groups
    size, remainder = divmod(len(devices), num_blocks)
    if remainder:
        return [devices]
    return [devices[i * size : (i + 1) * size] for i in range(num_blocks)]
