"""Replicas that differ are found, and named with their device."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.distributed.replicas import (
    Finding,
    _checksum,
    compare_replicas,
    flip_bit,
    make_checksums,
    replicated_shardings,
)

CUBE = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
EMBEDDING = "params.embedding.weight"


CHECKSUMS = {}


def find_differences(program, state) -> list[Finding]:
    key = program.mesh, repr(program.config)
    if key not in CHECKSUMS:  # Each program is compiled once.
        CHECKSUMS[key] = make_checksums(program.state, program.mesh)
    return compare_replicas(CHECKSUMS[key](state), program.state, program.mesh)


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [pytest.param(("mesh.data=3",), 3, marks=pytest.mark.slow), (CUBE, 8)],
)
def test_a_flipped_bit_is_found_where_it_is(programs, mesh, devices):
    """The bit may be in any array with copies, on any device."""
    size = ("data.batch_size=24", "train.skip_sigma=4", "optimizer.ema_decay=0.9")
    program = programs([*mesh, *size], devices=devices)
    state = program.init()
    assert find_differences(program, state) == []
    names = list(replicated_shardings(program.state))
    assert {"step", "recent.values"} < {*names}
    for name in ("step", names[0], names[len(names) // 2], names[-1]):
        for device in (0, devices - 1):
            findings = find_differences(program, flip_bit(state, name, device))
            assert {f.array for f in findings} == {name}
            suspects = [f.device for f in findings]
            assert suspects == [device] or (device in suspects and len(findings) == 2)
            assert all(f.certain == (len(findings) == 1) for f in findings)
    assert find_differences(program, state) == []


def test_either_of_two_copies_may_be_wrong(programs):
    """Devices that hold other parts of the array are beyond suspicion."""
    program = programs(CUBE, devices=8)
    # The array is sharded over fsdp and tensor, and has copies along data.
    name = "params.layers.0.0.mlp.up.weight"
    copies = program.mesh.devices[..., 0, :, :, 1]  # fsdp=0 tensor=1
    first, second = (d.id for d in copies.squeeze())
    findings = find_differences(program, flip_bit(program.init(), name, second))
    assert [(f.device, f.certain) for f in findings] == [
        (first, False),
        (second, False),
    ]
    assert findings[1].place == {"data": 1, "fsdp": 0, "tensor": 1}
    assert "(data=1 fsdp=0 tensor=1) differs from a copy; either" in str(findings[1])


def test_arrays_without_replicas_are_not_compared(programs):
    single = programs(devices=1)
    assert make_checksums(single.state, single.mesh) is None
    program = programs(["mesh.fsdp=8"], devices=8)
    name = "params.layers.0.0.mlp.up.weight"
    assert name not in replicated_shardings(program.state)
    assert find_differences(program, flip_bit(program.init(), name, 3)) == []


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "int32", "float8_e4m3fn", "bool"]),
    at=st.integers(0, 5),
    other=st.integers(0, 5),
    bit=st.integers(0, 31),
)
def test_any_bit_and_any_swap_changes_the_sum(dtype, at, other, bit):
    numbers = np.array([0, 1, 2, 3, 0, 7]).astype(jnp.dtype(dtype))
    width = 8 * numbers.itemsize
    checksum = int(_checksum(jnp.asarray(numbers.reshape(2, 3))))
    bits = numbers.copy().view(f"uint{width}")
    bits[at] ^= 1 << (bit % width) if dtype != "bool" else 1
    flipped = bits.view(numbers.dtype)
    assert int(_checksum(jnp.asarray(flipped.reshape(2, 3)))) != checksum
    swapped = numbers.copy()
    swapped[[at, other]] = swapped[[other, at]]
    is_equal = (swapped == numbers).all()
    assert (int(_checksum(jnp.asarray(swapped.reshape(2, 3)))) == checksum) == is_equal
