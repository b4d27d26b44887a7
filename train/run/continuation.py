"""Decide whether a start may continue a run, by comparing it with earlier starts."""

import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from etils import epath

from data.errors import Mistake
from model.catalog import parts_of
from model.config import ModelConfig
from model.gpt import abstract_gpt, params_of
from model.params import named
from train.config import Schedule, ScheduleConfig
from train.core.optimizer.schedule import make_schedule
from train.errors import ConfigError
from train.identity import ChangeKind, Difference, config_differences, refused
from train.run.digests import newest_description
from train.run.history import evidence_of_checkpoint
from train.run.metrics import read_events
from train.run.starts import (
    check_data,
    first_config,
    is_recorded,
    newest_described_config,
    newest_start,
    other_file_mistake,
    read_results,
    yaml_value,
)
from train.run.this_start import ThisStart
from train.run.versions import own_file_version

log = logging.getLogger(__name__)

_DATA_PATH = re.compile(r"data\.(sources\..+\.)?path")  # keys with locations of data


class Continuation(NamedTuple):
    """The terms under which a start continues the run.

    schedule_steps: the length of the learning-rate schedule: train.num_steps of the
        first start, unless a later start changed it before the decay of `wsd` began.
    run_id: the run's identity, which its starts and checkpoints record.
    skip_batches: the batches that this start or an earlier one skips, as a flat list of
        ranges: first, last, first, last, ...
    earlier_skips: data.skip_batches of earlier starts, in the same form.
    rewind_to: run.rewind_to; None if an earlier start has already done this rewind.
    finished: whether the run has reached its last step and written its results.
    evidence: which record shows that the run has had a checkpoint; empty if none does.
    """

    schedule_steps: int
    run_id: str
    skip_batches: list[int]
    earlier_skips: list[int]
    rewind_to: int | None = None
    finished: bool = False
    evidence: str = ""


def compare_with_run(start: ThisStart) -> Continuation:
    """Return how a start continues its run; write nothing.

    Raises:
        ConfigError: changed keys would make this a different run; all are named.
        DataError: the data is not that of the run.
    """
    path = start.path
    config = start.config
    num_steps = config.train.num_steps
    skip_batches = config.data.skip_batches
    original = first_config(path)
    last_start = newest_start(path)
    _check_own_file(path, last_start.get("own_file"))
    saved_config, description = newest_described_config(path, last_start.get("run_id"))
    run_id = last_start.get("run_id") or description.get("run_id") or uuid.uuid4().hex
    interval = config.checkpoint.save_interval_steps
    if original is not None:
        interval = original.checkpoint.save_interval_steps
    changed = last_start.get("changes", {})
    interval = changed.get("checkpoint.save_interval_steps", interval)
    evidence = evidence_of_checkpoint(path, interval)
    if original is None:
        return Continuation(
            num_steps, run_id, skip_batches, earlier_skips=[], evidence=evidence
        )
    rewind_to = config.run.rewind_to
    changes = config_differences(original, config)
    if saved_config is not None and not is_recorded(path):
        keys = {change.key for change in changes}
        saved_changes = config_differences(saved_config, config)
        changes += [change for change in saved_changes if change.key not in keys]
    check_changes(
        path, changes, start, saved_model=original.model, last_start=last_start
    )
    earlier_skips = last_start.get("changes", {}).get("data.skip_batches")
    earlier_skips = earlier_skips or original.data.skip_batches
    if saved_config is not None:  # the record of the last start may be missing
        earlier_skips = _merge_ranges(earlier_skips, saved_config.data.skip_batches)
    skip_batches = _merge_ranges(earlier_skips, skip_batches)
    if rewind_to is not None and any(
        event.get("rewind_to") == rewind_to and event.get("left_out") == skip_batches
        for event in read_events(path)
    ):
        log.warning(
            "run.rewind_to=%d was done by an earlier start, and is not done again; to "
            "go back there again give run.rewind_to=%d",
            *(rewind_to, rewind_to + 1),
        )
        rewind_to = None
    results_step = read_results(path).get("step", -1)
    newest_step, _ = newest_description(path / "checkpoints", run_id)
    newest_step = newest_step if rewind_to is None else min(newest_step, rewind_to)
    if newest_step > max(results_step, num_steps):
        target = changed.get("train.num_steps") or original.train.num_steps
        raise _passed_end(path, num_steps, newest_step, target)
    finished = rewind_to is None and results_step >= num_steps
    schedule_steps = last_start.get("schedule_steps") or original.train.num_steps
    if not finished:
        schedule = config.schedule.in_steps(config.data)
        keeps_length = config.optimizer.base_steps is not None
        schedule_steps = _schedule_steps(
            schedule,
            schedule_steps,
            wanted_steps=num_steps,
            newest_step=newest_step,
            keeps_length=keeps_length,
        )
    return Continuation(
        schedule_steps,
        run_id,
        skip_batches=skip_batches,
        earlier_skips=earlier_skips,
        rewind_to=rewind_to,
        finished=finished,
        evidence=evidence,
    )


def _check_own_file(path: epath.Path, recorded: Mapping[str, str] | None) -> None:
    """Compare the user's own file that started a run with that of this process.

    Raises:
        ConfigError: the run was started by another file.
    """
    own = own_file_version()
    if recorded is None:
        return
    if own is None or own["name"] != recorded["name"]:
        raise ConfigError([other_file_mistake(str(path), recorded)])
    if own != recorded:
        log.warning("%s differs from the file that the run was started by", own["name"])


def check_changes(
    path: epath.Path,
    changes: list[Difference],
    start: ThisStart,
    *,
    saved_model: ModelConfig,
    last_start: Mapping[str, Any],
) -> None:
    """Check the changes from a run's config to that of a start, and the data.

    `path` is the directory of the run that the start continues: its own, or the trunk
    of a branch that begins. `saved_model` is the model of this run, and `last_start`
    the record of its last start. The data may differ from that of the run if `start`
    changes it.

    Raises:
        ConfigError: changed keys would make this a different run; all are named.
        DataError: the data is not that of the run.
    """
    config = start.config
    sources = start.sources
    if last_start.get("data_fingerprints") == sources.fingerprints:
        changes = [
            c._replace(kind=ChangeKind.allowed) if _DATA_PATH.fullmatch(c.key) else c
            for c in changes
        ]
    if refused_changes := refused(changes, config.run.allow_change):
        raise ConfigError(
            _refusals(refused_changes, path, saved=saved_model, wanted=config.model)
        )
    earlier_changes = last_start.get("changes", {})
    new_choices = [
        change
        for change in changes
        if change.key.startswith("data.")
        and change.kind is ChangeKind.refused  # but run.allow_change permits it
        and earlier_changes.get(change.key) != yaml_value(change.new)
    ]
    if new_choices:
        log.warning("other data from here on: %s", "; ".join(map(str, new_choices)))
    else:
        check_data(path, sources)


def _refusals(
    changes: list[Difference],
    path: epath.Path,
    *,
    saved: ModelConfig,
    wanted: ModelConfig,
) -> list[Mistake]:
    """Return a mistake with its remedies for each refused change.

    `run.allow_change` is advised only if the saved parameters fit the wanted model.
    """
    mistakes = []
    model_keys = {c.key for c in changes if c.key.startswith("model.")}
    fits = not model_keys or _parameters_fit(saved, wanted)
    for change in changes:
        rule = f"differs from the run in {path}, which has {change.old}; take it back"
        if fits or change.key not in model_keys:
            rule += ", start another run.name, or add "
            rule += f"run.allow_change=[{change.key}]"
        else:
            rule += ", or start another run.name: the arrays that the run has saved "
            rule += "do not fit this model"
        mistakes.append(Mistake(change.key, change.new, rule))
    return mistakes


def _parameters_fit(saved: ModelConfig, wanted: ModelConfig) -> bool:
    """Return whether saved parameters have the names and shapes of a model's."""
    saved_shapes, wanted_shapes = (
        {
            name: leaf.shape
            for name, leaf in named(params_of(abstract_gpt(model, parts_of(model))))
        }
        for model in (saved, wanted)
    )
    return saved_shapes == wanted_shapes


def _schedule_steps(
    schedule: ScheduleConfig,
    previous_steps: int,
    *,
    wanted_steps: int,
    newest_step: int,
    keeps_length: bool,
) -> int:
    """Return the schedule's length; log if it differs from train.num_steps.

    `wanted_steps` is train.num_steps, and `newest_step` the step that this start
    continues from. With `keeps_length`, the length stays as it is, without a message.
    """
    has_one_rate = schedule.name is Schedule.constant
    if wanted_steps == previous_steps or has_one_rate or keeps_length:
        return previous_steps
    rate, new_rate = (
        make_schedule(schedule, n) for n in (previous_steps, wanted_steps)
    )
    taken_steps = jnp.arange(max(0, newest_step))
    if jnp.array_equal(rate(taken_steps), new_rate(taken_steps)):
        message = "the schedule's length was %d steps, and is %d now"
        log.info(message, previous_steps, wanted_steps)
        return wanted_steps
    if wanted_steps > previous_steps:
        log.info(
            "the schedule keeps its length, %d steps, and stays at its last value "
            "after them",
            previous_steps,
        )
        if schedule.ends_at_zero:
            log.warning(
                "the last value is 0, so nothing is learned after that; add schedule."
                "final_fraction=0.1 run.allow_change=[schedule.final_fraction]"
            )
        return previous_steps
    remedy = "a schedule of the new length needs another run.name"
    if schedule.has_decay:
        decay_start = min(map(schedule.decay_start, (previous_steps, wanted_steps)))
        remedy = f"add run.rewind_to={decay_start}, if a checkpoint up to there is kept"
    log.warning(
        "the schedule keeps its length, %d steps: the run ends at %.0f%% of the peak "
        "rate; %s",
        *(previous_steps, 100 * float(rate(jnp.int32(wanted_steps - 1))), remedy),
    )
    return previous_steps


def _passed_end(
    path: epath.Path, num_steps: int, newest_step: int, target: int
) -> ConfigError:
    """Return the error for a train.num_steps that the run has already passed.

    `target` is the train.num_steps of the run's last start.
    """
    rule = (
        f"is below step {newest_step}, which the run in {path} has reached on its way "
        f"to {target}; give at least {newest_step}, go back with run.rewind_to, or "
        f"start another run.name"
    )
    return ConfigError([Mistake("train.num_steps", num_steps, rule)])


def _merge_ranges(earlier: list[int], added: list[int]) -> list[int]:
    """Merge two flat lists of ranges of batches: first, last, first, last, ..."""
    ranges = [*zip(earlier[::2], earlier[1::2], strict=True)]
    ranges += zip(added[::2], added[1::2], strict=True)
    merged: list[int] = []
    for first, last in sorted(set(ranges)):
        if merged and first <= merged[-1]:
            merged[-1] = max(merged[-1], last)
        else:
            merged += [first, last]
    return merged
