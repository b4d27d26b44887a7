"""Choose the steps of weight gathers and gradient reduce-scatters along a mesh axis.

XLA:TPU gathers in one step over all links. It replaces a reduce-scatter over all chips
of a slice by an all-reduce of the whole array, which sends twice the bytes. Two steps
avoid this: a reduce-scatter over planes of the torus, then one over the lines across
the planes. But most of the bytes then use only the links of the planes. The shape of
the slice decides which form takes less time (docs/log). "Scatter" here always means
reduce-scatter.
"""

from collections.abc import Sequence

from jax.sharding import Mesh

from model.gather import AxisSteps
from train.hardware.chips import Chip, chip_of
from train.hardware.interconnect import (
    extents,
    members_along,
    num_links,
    num_slices,
    rings,
    slice_of,
)
from train.resolve.mesh import Device

# The largest number of chips over which XLA scatters in one step, by links per chip.
_MAX_CHIPS = {4: 8, 6: 4}
# The largest number of devices over which XLA gathers in one step in a slice without
# rings, for chips with two devices (tpu7x).
_MAX_DEVICES = 32


def collective_steps(mesh: Mesh) -> tuple[AxisSteps, ...]:
    """Return the steps of each mesh axis that needs several steps; () without TPUs."""
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    if device.platform != "tpu" or chip is None or chip.links not in _MAX_CHIPS:
        return ()
    all_steps = []
    for axis in mesh.axis_names:
        members = members_along(mesh, [axis])
        slices = num_slices(members)
        # Skip axes whose neighbours are in one slice: the stride below needs neighbours
        # in different slices, which only fsdp has (train/resolve/mesh.py).
        if slices > 1 and num_slices(members[:2]) == 1:
            continue
        local_members = members[::slices]
        slice_ = slice_of(mesh, device)
        gather = _gather_sizes(local_members, slice_, chip)
        scatter = _scatter_sizes(local_members, slice_, chip)
        # On a 2D torus, XLA gathers small arrays by an all-reduce. So their gathers
        # take the steps of a scatter.
        small_gather = scatter if chip.links == 4 else gather
        sizes = (*small_gather, slices, *scatter)
        if any(size not in (1, len(members)) for size in sizes):
            steps = AxisSteps(
                axis, (*gather, slices), (*small_gather, slices), (*scatter, slices)
            )
            all_steps.append(steps)
    return tuple(all_steps)


def _gather_sizes(
    members: Sequence[Device], slice_: Sequence[Device], chip: Chip
) -> tuple[int, ...]:
    """Return the group sizes of a gather's steps over devices of a slice."""
    size = len(members)
    fills_slice = len(members) == len(slice_)
    is_torus = all(rings(extents(slice_), chip))
    if chip.devices == 1 or not fills_slice or is_torus or size <= _MAX_DEVICES:
        return (size,)
    return _plane_and_line_sizes(members)


def _scatter_sizes(
    members: Sequence[Device], slice_: Sequence[Device], chip: Chip
) -> tuple[int, ...]:
    """Return the group sizes of a scatter's steps over devices of a slice."""
    size = len(members)
    two_steps = _plane_and_line_sizes(members)
    is_small = size <= _MAX_CHIPS[chip.links or 0]
    if chip.scatters_in_one_step or is_small or len(two_steps) == 1:
        return (size,)

    def count_links(group: Sequence[Device]) -> int:
        # XLA uses all dims of a group at once only if their sizes are equal.
        is_equal = len({extent for extent in extents(group) if extent > 1}) == 1
        return num_links(group, slice_, chip, None if is_equal else 1)

    is_all_reduced = size == len(slice_)
    # Times are relative to sending the whole array over one link.
    one_step_time = (1 - 1 / size) / count_links(members)
    if is_all_reduced:
        one_step_time = 2 * (1 - 1 / size) / num_links(members, slice_, chip)
    plane, line = two_steps
    plane_time = (1 - 1 / plane) / count_links(members[::line])
    line_time = (1 / plane - 1 / size) / count_links(members[:line])
    # The form that sends fewer bytes is preferred if the times are equal.
    limit = one_step_time * (1.001 if is_all_reduced else 0.999)
    return two_steps if plane_time + line_time < limit else (size,)


def _plane_and_line_sizes(devices: Sequence[Device]) -> tuple[int, ...]:
    """Return the sizes of a plane and of a line across planes, or of one line."""
    line = len(devices)
    for length in range(1, len(devices)):
        if sum(extent > 1 for extent in extents(devices[: length + 1])) > 1:
            line = length
            break
    if len(devices) % line or line == len(devices):
        return (len(devices),)
    return len(devices) // line, line
