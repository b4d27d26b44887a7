"""Find silent corruption by comparing the replicas of each array.

Devices whose mesh coordinates differ only along axes over which an array is replicated
have the same shard. Each device computes a checksum of its shard; if the checksums of
replicas differ, a replica is corrupt. A change of one element always changes the
checksum. Any other change is missed with a probability of 2**-32. Shards without a
replica are not checked.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.params import named
from train.core.optimizer.rounding import entry_ids, hash_bits


class Finding(NamedTuple):
    """A device whose shard of an array differs from its replicas."""

    array: str
    device: int  # JAX's id of the device
    process: int
    place: dict[str, int]  # coordinates on the mesh axes with more than one device
    certain: bool  # True: this replica is corrupt; False: it or another one is

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={index}" for axis, index in self.place.items())
        others = "its copies" if self.certain else "a copy; either may be wrong"
        return (
            f"{self.array} on device {self.device} of process {self.process} ({axes}) "
            f"differs from {others}"
        )


def make_checksums(state: Any, mesh: Mesh):
    """Return a jitted `checksums(state)`; None if no array is replicated.

    The checksums are uint32 [replicated arrays, devices], replicated on every device.
    The leaves of `state` may be `jax.ShapeDtypeStruct` with shardings.
    """
    shardings = replicated_shardings(state)
    if not shardings:
        return None

    def local_checksums(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_checksum(shard) for shard in shards])[:, None]

    # Under shard_map each device reads its local shard; XLA cannot use a replica's.
    all_checksums = jax.shard_map(
        local_checksums,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in shardings.values()),
        out_specs=PartitionSpec(None, mesh.axis_names),
    )

    def checksums(state: Any) -> jax.Array:
        arrays = dict(named(state))
        space = jax.memory.Space.Device
        return all_checksums(*(jax.device_put(arrays[n], space) for n in shardings))

    return jax.jit(
        checksums,
        in_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state),),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )


def replicated_shardings(state: Any) -> dict[str, NamedSharding]:
    """Return the shardings of the arrays that have replicas, by name."""
    leaves = named(state)
    return {n: leaf.sharding for n, leaf in leaves if _replica_axes(leaf.sharding)}


def compare_replicas(checksums: jax.Array, state: Any, mesh: Mesh) -> list[Finding]:
    """Return a finding for each device whose checksum is not the most common one.

    Checksums are compared among the replicas of a shard. If two are equally common, as
    with two replicas that differ, there is an uncertain finding for every replica.
    `checksums` is a result of the function from `make_checksums(state, mesh)`.
    """
    device_numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    findings = []
    for sums, (name, sharding) in zip(
        np.asarray(checksums), replicated_shardings(state).items(), strict=True
    ):
        axes = _replica_axes(sharding)
        num_replicas = math.prod(mesh.devices.shape[axis] for axis in axes)
        replicas_last = np.moveaxis(device_numbers, axes, range(-len(axes), 0))
        # [shards, replicas] device numbers
        replica_groups = replicas_last.reshape(-1, num_replicas)
        group_sums = sums[replica_groups]
        for group in replica_groups[(group_sums != group_sums[:, :1]).any(axis=1)]:
            values, counts = np.unique(sums[group], return_counts=True)
            most_common = values[counts == counts.max()]
            certain = len(most_common) == 1
            deviating = group[sums[group] != most_common[0]] if certain else group
            findings += [_finding(name, mesh, number, certain) for number in deviating]
    return findings


def _finding(array: str, mesh: Mesh, number: int, certain: bool) -> Finding:
    indices = map(int, np.unravel_index(number, mesh.devices.shape))
    axes = zip(mesh.shape.items(), indices, strict=True)
    coordinates = {axis: index for (axis, size), index in axes if size > 1}
    device: Any = mesh.devices.flat[number]
    return Finding(array, device.id, device.process_index, coordinates, certain)


def flip_bit(state: Any, array: str, device: int) -> Any:
    """Return the state with one bit flipped in a device's shard of an array.

    Fault injection uses this. Only the process that the device belongs to changes data.
    """

    def local_data(shard: Any) -> jax.Array:
        if shard.device.id != device:
            return shard.data
        elements = np.array(shard.data)
        elements.reshape(-1).view(np.uint8)[-elements.itemsize] ^= 1  # last element
        return jax.device_put(elements, shard.data.sharding)

    def flip_leaf(path: Any, leaf: jax.Array) -> jax.Array:
        if jax.tree_util.keystr(path, simple=True, separator=".") != array:
            return leaf
        shards = [local_data(shard) for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, shards
        )

    return jax.tree_util.tree_map_with_path(flip_leaf, state)


def _replica_axes(sharding: NamedSharding) -> list[int]:
    """Return the indices of the mesh axes along which an array is replicated."""
    splitting = set(jax.tree.leaves(tuple(sharding.spec)))
    axes = enumerate(sharding.mesh.shape.items())
    return [n for n, (axis, size) in axes if size > 1 and axis not in splitting]


def _checksum(shard: jax.Array) -> jax.Array:
    """Return the sum of hashes, each of one element of a shard and its index."""
    bits = shard.view(f"uint{8 * shard.dtype.itemsize}")
    hashes = hash_bits(bits.astype(jnp.uint32) ^ entry_ids(shard.shape))
    return jnp.sum(hashes, dtype=jnp.uint32)
