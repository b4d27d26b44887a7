"""Decide which actions are due after a step."""

from typing import NamedTuple

from train.config import EvalConfig, LogConfig, TrainConfig
from train.core.services import SAVE


class Due(NamedTuple):
    """The actions that are due right after a step.

    score_tasks: score the state on eval.tasks.
    check: compare the replicas of the state.
    last: this process trains no further step.
    stop: the exit code, if a stop was requested.
    """

    log: bool
    evaluate: bool
    score_tasks: bool
    check: bool
    save: bool
    last: bool
    stop: int | None


def due_after(
    step: int,
    train: TrainConfig,
    log: LogConfig,
    evaluation: EvalConfig,
    *,
    request: str | int | None,
    save_due: bool,
) -> Due:
    """Return what to do right after a step.

    `request` is SAVE or an exit code if all processes agreed on a request for this
    step. After the last step, a request has no effect. `save_due` tells whether
    `checkpoint.save_interval_steps` requires a save.
    """
    run_ends = step == train.num_steps
    stop = None if request == SAVE or run_ends or request is None else int(request)
    last = run_ends or stop is not None
    save = last or request == SAVE or save_due
    check_interval = train.replica_check_interval_steps or 0
    return Due(
        log=run_ends or step % log.interval_steps == 0,
        evaluate=run_ends or step % evaluation.interval_steps == 0,
        score_tasks=bool(evaluation.tasks)
        and not run_ends
        and step % evaluation.task_interval_steps == 0,
        check=check_interval > 0 and (save or step % check_interval == 0),
        save=save,
        last=last,
        stop=stop,
    )
