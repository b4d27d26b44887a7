"""Decide what is due after a step, as a function of the step."""

from typing import NamedTuple

from train.config import Config
from train.distributed.preemption import SAVE


class Due(NamedTuple):
    """The actions that are due right after a step.

    last: this process trains no further step.
    stop: the exit code to end with, if a stop was requested.
    """

    log: bool
    evaluate: bool
    judge: bool
    check: bool
    save: bool
    last: bool
    stop: int | None


def due_after(
    step: int, config: Config, request: str | int | None, save_due: bool
) -> Due:
    """Return what to do right after a step.

    Args:
        step: the number of completed updates.
        config: gives the intervals.
        request: what all processes agreed to do after this step: SAVE, or an exit
            code. The last step ends the run, whatever was requested.
        save_due: whether checkpoint.save_interval_steps requires a save.
    """
    end = step == config.train.num_steps
    stop = None if request == SAVE or end or request is None else int(request)
    last = end or stop is not None
    save = last or request == SAVE or save_due
    check_interval = config.train.replica_check_interval_steps or 0
    return Due(
        log=end or step % config.log.interval_steps == 0,
        # The final evaluation scores the last step, unless it may be the best one.
        evaluate=config.checkpoint.keep_best
        if end
        else step % config.eval.interval_steps == 0,
        judge=bool(config.eval.tasks)
        and not end
        and step % config.eval.task_interval_steps == 0,
        check=check_interval > 0 and (save or step % check_interval == 0),
        save=save,
        last=last,
        stop=stop,
    )
