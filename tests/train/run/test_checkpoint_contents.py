"""What a later start may read of what was saved, add to it, or leave of it."""

from unittest import mock

import jax
import pytest

from data.batches import Order
from data.errors import DataError
from model.params import named
from tests.train.run.conftest import ABOUT
from tests.train.run.states import like, make_state, same
from train.config import CheckpointConfig
from train.core.feed import place
from train.errors import ConfigError, exit_code
from train.run import checkpoint
from train.run.checkpoint import Checkpoints
from train.run.restore import SavedSteps

GUARDED = ("train.skip_sigma=4", "train.skip_window=4")


@pytest.mark.parametrize(
    ("before", "after"),
    [((), GUARDED), (GUARDED, ()), (GUARDED, (GUARDED[0], "train.skip_window=8"))],
    ids=["on", "off", "window"],
)
def test_recent_steps_that_are_not_there_begin_empty(programs, folder, before, after):
    """Whoever allowed train.skip_sigma to change finds the rest as it was."""
    old = programs(*before, devices=1)
    new = programs(*after, devices=1)
    state = old.init()
    checkpoints = Checkpoints(folder, CheckpointConfig())
    if state.recent is not None:
        state = state._replace(recent=jax.tree.map(lambda x: x + 3, state.recent))
    checkpoints.save(0, state, ABOUT)
    checkpoints.wait()
    restored = checkpoints.saved.restore(new.state)
    same(restored, state._replace(recent=new.init().recent))
    checkpoints.close()


AVERAGED = ("optimizer.ema_decay=0.9",)


@pytest.mark.parametrize(
    ("before", "after"), [((), AVERAGED), (AVERAGED, ())], ids=["on", "off"]
)
def test_an_average_that_is_new_begins_at_the_weights(
    programs, store, folder, before, after
):
    """Or ceases; whoever allowed it to change finds the rest as it was."""
    old = programs(*before, devices=1)
    new = programs(*after, devices=1)
    state = old.init()
    checkpoints = Checkpoints(folder, CheckpointConfig())
    if state.optimizer.average is not None:
        average = jax.tree.map(lambda x: x + 1, state.params)
        state = state._replace(optimizer=state.optimizer._replace(average=average))
    checkpoints.save(0, state, ABOUT)
    checkpoints.wait()
    restored = checkpoints.saved.restore(new.state)
    average = state.params if after else None
    same(restored.optimizer, state.optimizer._replace(average=average))
    same(restored.params, state.params)
    _, params = checkpoints.saved.restore_params(new.state)
    same(params, state.params)
    new.train_step(restored, place(Order(store, new.config.data, 0).read(0), new.batch))
    checkpoints.close()


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (("optimizer=lion",), "optimizer.name"),
        (("optimizer=adafactor",), "optimizer.name"),
        (("optimizer=muon",), "optimizer.name"),
        (("model.qk_norm=false",), "model"),
        (("model.mlp_dim=160",), "model"),
    ],
)
def test_what_cannot_go_on_is_refused_by_its_key(programs, folder, typed, key):
    """From the checkpoint and to it: neither is a crash that would be tried again."""
    one = programs(devices=1)
    other = programs(*typed, devices=1)
    for path, old, new in (("there", one, other), ("back", other, one)):
        checkpoints = Checkpoints(folder / path, CheckpointConfig())
        checkpoints.save(0, old.init(), ABOUT)
        checkpoints.wait()
        with pytest.raises(
            ConfigError, match="Take it back, or start another"
        ) as error:
            checkpoints.saved.restore(new.state)
        assert [mistake.key for mistake in error.value.mistakes] == [key]
        assert checkpoints.saved.steps() == [0]
        checkpoints.close()


@pytest.mark.parametrize("averaged", [False, True])
def test_to_evaluate_weights_alone_are_read(saved, folder, monkeypatch, averaged):
    """Or, where there is one, their average."""
    state = make_state(1)
    wanted = like()
    if averaged:
        average = state.optimizer._replace(average=make_state(2).params)
        state = state._replace(optimizer=average)
        average = wanted.optimizer._replace(average=wanted.params)
        wanted = wanted._replace(optimizer=average)
    checkpoints = saved()
    checkpoints.save(1, state, ABOUT)
    checkpoints.wait()
    reader = SavedSteps(folder)
    load = mock.Mock(side_effect=reader._orbax.load)
    monkeypatch.setattr(reader._orbax, "load", load)
    step, params = reader.restore_params(wanted)
    assert step == 1
    same(params, make_state(1 + averaged).params)
    of = "optimizer.average" if averaged else "params"
    read = {name for name, _ in named(load.call_args.kwargs["abstract_state"])}
    assert read == {f"{of}.w", f"{of}.b.half"}


@pytest.mark.parametrize("number", [1, 3])
def test_a_checkpoint_of_another_format_is_refused(saved, folder, monkeypatch, number):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", number)
        checkpoints = saved(1)
    rule = rf"{folder}/1 has format {number}, .* start another run\.name"
    for read in (checkpoints.saved.restore, checkpoints.saved.restore_params):
        with pytest.raises(DataError, match=rule) as error:
            read(like())
        assert exit_code(error.value) == 65
    assert checkpoints.saved.steps() == [1], "it is not set aside"
