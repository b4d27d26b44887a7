"""A later start may restore a checkpoint whose fields differ from its own state."""

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
def test_recent_steps_that_were_not_saved_begin_empty(programs, folder, before, after):
    """The rest of the state is restored as it was if train.skip_sigma may change."""
    old = programs(before, devices=1)
    new = programs(after, devices=1)
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
def test_a_new_average_begins_at_the_weights(programs, store, folder, before, after):
    """An average that is switched off is dropped. The rest is restored as it was."""
    old = programs(before, devices=1)
    new = programs(after, devices=1)
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
def test_a_change_that_cannot_continue_is_refused_by_its_key(
    programs, folder, typed, key
):
    """Both directions raise ConfigError, which is not a crash that would be retried."""
    base = programs(devices=1)
    variant = programs(typed, devices=1)
    for path, old, new in (("there", base, variant), ("back", variant, base)):
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
def test_an_evaluation_reads_only_the_weights(saved, folder, monkeypatch, averaged):
    """Only the average of the weights is read if the state has one."""
    state = make_state(1)
    abstract_state = like()
    if averaged:
        optimizer = state.optimizer._replace(average=make_state(2).params)
        state = state._replace(optimizer=optimizer)
        optimizer = abstract_state.optimizer._replace(average=abstract_state.params)
        abstract_state = abstract_state._replace(optimizer=optimizer)
    checkpoints = saved()
    checkpoints.save(1, state, ABOUT)
    checkpoints.wait()
    reader = SavedSteps(folder)
    load = mock.Mock(side_effect=reader._orbax.load)
    monkeypatch.setattr(reader._orbax, "load", load)
    step, params = reader.restore_params(abstract_state)
    assert step == 1
    same(params, make_state(1 + averaged).params)
    prefix = "optimizer.average" if averaged else "params"
    names = {name for name, _ in named(load.call_args.kwargs["abstract_state"])}
    assert names == {f"{prefix}.w", f"{prefix}.b.half"}


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
