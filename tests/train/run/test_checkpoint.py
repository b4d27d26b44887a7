"""A saved state is restored exactly, and the steps that should be kept stay."""

import gc
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.errors import DataError
from tests.train.run.conftest import ABOUT
from tests.train.run.states import like, make_state, same
from train.config import CheckpointConfig
from train.core.layout import state_shardings
from train.errors import ConfigError
from train.run import checkpoint
from train.run.checkpoint import Checkpoints
from train.run.restore import SavedSteps


def test_a_saved_state_is_restored_bitwise(saved):
    """The state may be donated as soon as `save` returns."""
    checkpoints = saved(1)
    state = make_state(2)
    checkpoints.save(2, state, ABOUT)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    checkpoints.wait()
    same(checkpoints.saved.restore(like()), make_state(2))
    same(checkpoints.saved.restore(like(), 1), make_state(1))


def test_the_best_step_outlives_newer_ones(saved, folder):
    checkpoints = saved(keep_best=True, keep_latest=1)
    with pytest.raises(ConfigError, match="no checkpoint was evaluated"):
        checkpoints.saved.best()
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0}
    better = []
    for step in range(1, 6):
        better.append(step in losses and checkpoints.record_loss(step, losses[step]))
        checkpoints.save(step, make_state(step), ABOUT)
        checkpoints.wait()
    assert better == [True, True, False, False, False]
    reader = SavedSteps(folder)
    assert (reader.steps(), reader.best()) == ([2, 5], 2)
    same(reader.restore(like()), make_state(5))
    assert [saved(keep_best=True).record_loss(6, loss) for loss in (1.5, 0.5)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("scores", "kept", "best"),
    [
        # Each case is {step: (loss, number of targets)}, the steps that are kept in
        # addition to the newest one, and the best step.
        ({1: (1.0, 10), 2: (3.0, 20), 3: (2.0, 20), 4: (2.5, 20)}, {1, 3}, 3),
        ({1: (2.0, 10), 2: (1.0, 10), 3: (5.0, 20), 4: (6.0, 20)}, {2, 3}, 3),
        ({1: (1.0, None), 2: (3.0, 20), 3: (4.0, 20), 4: (5.0, 20)}, {1, 2}, 2),
        ({1: (1.0, 10), 2: (2.0, 20), 3: (0.5, 10), 4: (0.7, 10)}, {2, 3}, 3),
    ],
)
def test_only_losses_of_the_same_rows_compete(saved, folder, scores, kept, best):
    """Each start scores different rows if its settings differ."""
    previous_targets = object()
    better = {}
    for step, (loss, targets) in scores.items():
        if targets != previous_targets:
            checkpoints = saved(keep_best=True, keep_latest=1)
        previous_targets = targets
        better[step] = checkpoints.record_loss(step, loss, targets)
        checkpoints.save(step, make_state(step), ABOUT)
        checkpoints.wait()
    for step, (loss, targets) in scores.items():
        earlier = [x for s, (x, n) in scores.items() if s < step and n == targets]
        assert better[step] == (loss < min(earlier, default=float("inf")))
    checkpoints.save(5, make_state(5), ABOUT)
    checkpoints.wait()
    reader = SavedSteps(folder)
    assert {*reader.steps()} == kept | {5}
    assert reader.best() == best


def test_no_checkpoint_is_a_fresh_start(saved):
    assert saved().saved.restore(like()) is None
    with pytest.raises(DataError, match="no checkpoint yet"):
        saved().saved.restore_params(like())


def test_a_table_of_another_size_is_refused(folder):
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(1, make_state(1, size=1030), ABOUT)
    checkpoints.wait()
    for size in (1029, 1031, 1152):
        with pytest.raises(ConfigError, match=r"was saved as \(1030, 8\)"):
            checkpoints.saved.restore(like(size))
    checkpoints.close()


def test_another_mesh_restores_to_its_own_layout(programs, folder):
    """The mesh changes from data 2 x fsdp 2 x tensor 2 to fsdp 8.

    Every restored leaf has the sharding that the rule table of the new mesh gives.
    """
    old = programs(["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"], devices=8)
    new = programs(["mesh.fsdp=8"], devices=8)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.device_put(
            jnp.asarray(rng.normal(size=x.shape), x.dtype), x.sharding
        ),
        old.state,
    )
    state = state._replace(step=jax.device_put(jnp.int32(4), state.step.sharding))
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(4, state, ABOUT)
    checkpoints.wait()
    restored = checkpoints.saved.restore(new.state)
    checkpoints.close()
    same(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == new.shardings
    assert new.shardings == state_shardings(new.state, new.layout)
    head = restored.params["head"]["weight"]
    assert head.addressable_shards[0].data.shape == (4, 384)


def test_the_latest_steps_and_every_nth_step_are_kept(saved, folder):
    checkpoints = saved(*range(1, 12), keep_latest=2, keep_every_steps=4)
    assert checkpoints.saved.steps() == [4, 8, 10, 11]
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
    assert sorted(steps) == [4, 8, 10, 11]


def test_rewinding_sets_aside_later_steps(saved, folder):
    checkpoints = saved(1, 3, 5, keep_latest=3)
    with pytest.raises(ConfigError, match=r"run\.rewind_to.*\n.*\[1, 3, 5\]"):
        checkpoints.saved.restore(like(), at_most=0)
    same(checkpoints.saved.restore(like(), at_most=4), make_state(3))
    assert checkpoints.saved.steps() == [1, 3]
    assert [p.name[:2] for p in (folder / "quarantine").iterdir()] == ["5-"]
    checkpoints.save(5, make_state(5, seed=9), ABOUT)
    checkpoints.wait()
    same(saved().saved.restore(like()), make_state(5, seed=9))


def test_a_restore_that_runs_out_of_memory_sets_nothing_aside(
    saved, folder, monkeypatch
):
    checkpoints = saved(1)
    failing = mock.Mock(side_effect=MemoryError)
    monkeypatch.setattr(checkpoints.saved._orbax, "load", failing)
    with pytest.raises(MemoryError) as error:
        checkpoints.saved.restore(like())
    assert "memory, disk or network failed" in error.value.__notes__[0]
    assert checkpoints.saved.steps() == [1]


def test_a_save_is_due_by_steps_and_by_minutes(folder, monkeypatch):
    config = CheckpointConfig(save_interval_steps=10, save_interval_minutes=5.0)
    now = [1000.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    checkpoints = Checkpoints(folder, config)
    assert [s for s in range(1, 31) if checkpoints.due(s)] == [10, 20, 30]
    now[0] += 5 * 60
    assert not checkpoints.due(11)
    assert checkpoints.due_by_time()
    assert not checkpoints.due_by_time()  # all processes have been asked by now
    checkpoints.save(11, make_state(11), ABOUT)
    assert not checkpoints.due_by_time()
    now[0] += 5 * 60
    assert checkpoints.due_by_time()
    checkpoints.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_over_many_saves(folder):
    """Some Orbax versions kept what they had written."""
    checkpoints = Checkpoints(folder, CheckpointConfig())
    state = make_state(0, size=2**14)  # 1.5 MiB
    sizes = {}
    for step in range(1, 201):
        checkpoints.save(step, state, ABOUT)
        checkpoints.wait()
        if step in (60, 200):
            gc.collect()
            sizes[step] = resident_bytes()
    checkpoints.close()
    # 140 saves of 1.5 MiB: keeping even a tenth of them would show.
    assert sizes[200] - sizes[60] < 20 * 2**20
