"""Silent corruption, found by comparing what should be copies.

Devices that differ only in mesh axes on which an array is not split hold the same part
of it. Each sums up its own part; where the sums of copies differ, not all of them are
what was computed. A change of one number in a part changes its sum for certain, any
other change but for a chance of one in 2**32. What no second device holds is not
looked at.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.params import named
from train.optimizer.rounding import entry_ids, hash_bits


class Finding(NamedTuple):
    """A device whose part of an array is not what its copies are."""

    array: str
    device: int  # its id
    process: int
    place: dict[str, int]  # coordinates on the mesh axes of more than one device
    certain: bool  # False: it, or those that it differs from

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={index}" for axis, index in self.place.items())
        unlike = "its copies" if self.certain else "a copy; either may be wrong"
        return (
            f"{self.array} on device {self.device} of process {self.process} ({axes}) "
            f"differs from {unlike}"
        )


def make_checksums(state: Any, mesh: Mesh):
    """Build `checksums(state)`: uint32 [arrays with copies, devices], replicated.

    From `jax.ShapeDtypeStruct` leaves with their shardings; None: no array has copies.
    """
    shardings = copied(state)
    if not shardings:
        return None

    def of_device(*parts: jax.Array) -> jax.Array:
        return jnp.stack([_checksum(part) for part in parts])[:, None]

    # In here each device reads its own: to XLA these are not copies of each other.
    of_devices = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in shardings.values()),
        out_specs=PartitionSpec(None, mesh.axis_names),
    )

    def checksums(state: Any) -> jax.Array:
        arrays = dict(named(state))
        space = jax.memory.Space.Device
        return of_devices(*(jax.device_put(arrays[n], space) for n in shardings))

    return jax.jit(
        checksums,
        in_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state),),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )


def copied(state: Any) -> dict[str, NamedSharding]:
    """Return the shardings of the arrays of which devices hold copies, by name."""
    return {
        name: leaf.sharding for name, leaf in named(state) if _copy_axes(leaf.sharding)
    }


def compare_replicas(checksums: jax.Array, state: Any, mesh: Mesh) -> list[Finding]:
    """Return the devices that differ from most of their copies.

    Where none are most, as of two copies, all are named, and none as certain. The
    checksums are what `make_checksums(state, mesh)` computes.
    """
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    findings = []
    for sums, (name, sharding) in zip(
        np.asarray(checksums), copied(state).items(), strict=True
    ):
        axes = _copy_axes(sharding)
        num_copies = math.prod(mesh.devices.shape[axis] for axis in axes)
        last = range(-len(axes), 0)
        copies = np.moveaxis(numbers, axes, last).reshape(-1, num_copies)
        for group in copies[(sums[copies] != sums[copies[:, :1]]).any(axis=1)]:
            values, counts = np.unique(sums[group], return_counts=True)
            majority = values[counts == counts.max()]
            certain = len(majority) == 1
            deviating = group[sums[group] != majority[0]] if certain else group
            findings += [_finding(name, mesh, number, certain) for number in deviating]
    return findings


def _finding(array: str, mesh: Mesh, number: int, certain: bool) -> Finding:
    indices = map(int, np.unravel_index(number, mesh.devices.shape))
    axes = zip(mesh.shape.items(), indices, strict=True)
    coordinates = {axis: index for (axis, size), index in axes if size > 1}
    device: Any = mesh.devices.flat[number]
    return Finding(array, device.id, device.process_index, coordinates, certain)


def flip(state: Any, array: str, device: int) -> Any:
    """Flip the lowest bit of what a device holds of an array, as a defect would.

    For drills. Nothing happens on processes that do not own the device.
    """

    def part(shard: Any) -> jax.Array:
        if shard.device.id != device:
            return shard.data
        numbers = np.array(shard.data)
        numbers.reshape(-1).view(np.uint8)[-numbers.itemsize] ^= 1  # the last element
        return jax.device_put(numbers, shard.data.sharding)

    def flipped(path: Any, leaf: jax.Array) -> jax.Array:
        if jax.tree_util.keystr(path, simple=True, separator=".") != array:
            return leaf
        parts = [part(shard) for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, parts
        )

    return jax.tree_util.tree_map_with_path(flipped, state)


def _copy_axes(sharding: NamedSharding) -> list[int]:
    """Return the numbers of the mesh axes along which devices hold copies."""
    splitting = set(jax.tree.leaves(tuple(sharding.spec)))
    axes = enumerate(sharding.mesh.shape.items())
    return [n for n, (axis, size) in axes if size > 1 and axis not in splitting]


def _checksum(part: jax.Array) -> jax.Array:
    """Sum up the mixed bits of all numbers, each mixed with its place."""
    bits = part.view(f"uint{8 * part.dtype.itemsize}")
    numbers = hash_bits(bits.astype(jnp.uint32) ^ entry_ids(part.shape))
    return jnp.sum(numbers, dtype=jnp.uint32)
