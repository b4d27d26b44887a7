"""Every matrix is assigned once, and no device waits long for the busiest one."""

import math

import pytest

from train.optimizers.assignment import Matrices, assign


def llama3_8b(fsdp: int, tensor: int = 1) -> list[Matrices]:
    """Return the matrices of 32 layers: up, gate, down; query, output; key, value."""
    widths = [14336] * 3 + [4096] * 2 + [1024] * 2
    return [Matrices(32, 4096 // fsdp, width // tensor) for width in widths]


def busiest_work(rounds, ways) -> int:
    """Count the multiplications of the busiest device in all rounds."""
    return sum(
        r.count * r.batch * Matrices(1, r.rows, r.columns).work(ways) for r in rounds
    )


@pytest.mark.parametrize("devices", [1, 3, 64, 100, 256])
def test_every_matrix_is_assigned_once(devices):
    parameters = llama3_8b(1)
    _, rounds = assign(parameters, (1, 1), {"data": devices})
    assignments = [
        (span.parameter, i)
        for r in rounds
        for span in r.spans
        for i in range(span.start, span.stop)
    ]
    assert sorted(assignments) == [(p, i) for p in range(7) for i in range(32)]
    for r in rounds:
        assert (
            sum(span.stop - span.start for span in r.spans)
            <= r.count * r.batch * devices
        )
        for span in r.spans:
            part = parameters[span.parameter]
            assert part.rows <= r.rows
            assert part.columns <= r.columns


@pytest.mark.parametrize(
    ("ways", "most"), [((8, 1), 1.0), ((16, 2), 1.0), ((64, 1), 1.27), ((16, 4), 1.27)]
)
def test_the_busiest_device_has_little_more_than_its_share(ways, most):
    parameters = llama3_8b(*ways)
    all_work = sum(m.count * m.work(ways) for m in parameters)
    work = busiest_work(assign(parameters, ways, {})[1], ways)
    assert work * math.prod(ways) <= most * all_work


def test_with_more_devices_than_matrices_there_is_one_round():
    """Each has one matrix of 4,096 x 14,336."""
    (rounds,) = assign(llama3_8b(256), (256, 1), {"data": 2})[1]
    assert busiest_work([rounds], (256, 1)) == Matrices(1, 4096, 14336).work()


def test_replicas_share_the_work_only_if_that_saves_time():
    replica_axes = {"data": 2, "expert": 2}
    assert assign(llama3_8b(8), (8, 1), replica_axes)[0] == ("data", "expert")
    assert assign(llama3_8b(128), (128, 1), replica_axes)[0] == ("data",)
    assert assign(llama3_8b(256), (256, 1), replica_axes)[0] == ()


def test_small_matrices_go_as_one_batch_and_large_ones_in_a_loop():
    small = assign([Matrices(24, 96, 3072)], (8, 1), {})[1]
    assert [(r.count, r.batch) for r in small] == [(1, 3)]
    large = assign([Matrices(96, 512, 14336)], (8, 1), {})[1]
    assert [(r.count, r.batch) for r in large] == [(12, 1)]
