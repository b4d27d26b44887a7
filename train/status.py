"""`python -m train.status run.dir=...`: show a run's progress and use of time."""

import contextlib
import dataclasses
import io
import json
import math
import os
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from etils import epath
from rich.console import Console
from rich.live import Live
from rich.text import Text
from typing_extensions import Doc

from data.errors import Mistake
from train.cli.command import Command, run_command
from train.cli.rules import must_name_run
from train.cli.schema import read_yaml
from train.config import Config, RunConfig
from train.console import print_table
from train.errors import meaning
from train.identity import run_dir
from train.run.digests import is_sealed, saved_steps
from train.run.goodput import BUCKETS, Goodput, finite_float, goodput_of
from train.run.lease import read_owner
from train.run.metrics import newest_metrics, read_events
from train.run.starts import existing_run, newest_start, read_results
from train.run.validations import Validations, read_validations
from train.units import format_seconds

_FOLLOW_S = 2.0
_MISSED_RENEWALS = 5  # An owner that misses this many renewals counts as dead.
_LEASE_READ_S = 1.0


@dataclass(frozen=True)
class StatusConfig:
    """Keys of `python -m train.status`."""

    run: RunConfig = field(default_factory=RunConfig)
    json: Annotated[bool, Doc("Print one JSON object, for programs.")] = False
    follow: Annotated[
        bool, Doc("Print again at intervals, until no process runs the run.")
    ] = False


@dataclass(frozen=True)
class Save:
    """The newest checkpoint of a run.

    age_s: the time since the checkpoint was sealed; None if it is not sealed, or if
        the storage reports no modification time.
    """

    step: int
    sealed: bool
    age_s: float | None


@dataclass(frozen=True)
class Status:
    """The status of a run, read from its directory.

    state: finished, running, or stopped with the reason.
    owner: the process that runs the run, if there is one.
    silent_s: the time since the run's last record.
    left_s: the estimated time to the last step, if the run is running.
    validation: the evaluations.
    """

    state: str
    owner: str | None
    silent_s: float | None
    step: int
    num_steps: int
    left_s: float | None
    loss: float | None
    validation: Validations
    save: Save | None
    goodput: Goodput


def read_status(folder: epath.Path) -> Status:
    """Read the status of the run in a folder, without writing anything."""
    goodput = goodput_of(read_events(folder))
    silent_s = None
    num_steps = newest_start(folder).get("changes", {}).get("train.num_steps")
    if num_steps is None:
        num_steps = read_yaml(folder / "config.yaml").train.num_steps
    metrics = next((row for row in newest_metrics(folder) if "loss" in row), {})
    step = metrics.get("step", 0)
    if goodput.starts:
        step = max(step, goodput.starts[-1].last_step or 0)
        silent_s = max(0.0, time.time() - goodput.starts[-1].ended)
    owner = _live_owner(folder)
    return Status(
        state=_describe_state(folder, goodput, owner, num_steps),
        owner=owner,
        silent_s=silent_s,
        step=step,
        num_steps=num_steps,
        left_s=_seconds_left(goodput, num_steps) if owner else None,
        loss=finite_float(metrics.get("loss")),
        validation=read_validations(folder),
        save=_last_save(folder / "checkpoints"),
        goodput=goodput,
    )


def status_mistakes(config: StatusConfig) -> list[Mistake]:
    """Return a mistake if no run is named or if json and follow are combined."""
    mistakes = must_name_run(config)
    if config.json and config.follow:
        rule = "cannot be combined with json=true; leave out one of them"
        mistakes.append(Mistake("follow", config.follow, rule))
    return mistakes


def main(config: StatusConfig) -> int:
    """Print the status of a run.

    Raises:
        ConfigError: if there is no such run.
    """
    folder = existing_run(run_dir(Config(run=config.run)))
    status = read_status(folder)
    if config.follow:
        _follow(folder, status)
    elif config.json:
        print(json.dumps(_json_values(status)))
    else:
        _print_status(status)
    return 0


def _follow(folder: epath.Path, status: Status) -> None:
    """Redraw the status until the run ends; without a terminal, print it at the end."""
    with Live(auto_refresh=False, console=Console()) as live:
        while True:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                _print_status(status)
            live.update(Text(output.getvalue()), refresh=True)
            if status.owner is None:
                return
            time.sleep(_FOLLOW_S)
            status = read_status(folder)


def _live_owner(folder: epath.Path) -> str | None:
    """Return the process that runs the run, or None if no live process does.

    On the owner's machine, the process table shows whether the owner lives. On other
    machines, only a renewal of the lease shows it: a run that compiles records nothing.
    """
    first_owner = owner = read_owner(os.fspath(folder))
    if owner is None:
        return None
    if (alive := owner.alive()) is not None:
        return str(owner) if alive else None
    interval_s = read_yaml(folder / "config.yaml").run.lease_interval_s
    for _ in range(math.ceil(_MISSED_RENEWALS * interval_s)):
        time.sleep(_LEASE_READ_S)
        owner = read_owner(os.fspath(folder))
        if owner != first_owner:
            return str(owner) if owner else None
    return None


def _describe_state(
    folder: epath.Path, goodput: Goodput, owner: str | None, num_steps: int
) -> str:
    if read_results(folder).get("step", -1) >= num_steps:
        return "finished"
    if owner:
        return "running"
    if not goodput.starts:
        return "stopped: before it recorded anything"
    return f"stopped: {meaning(goodput.starts[-1].code)}"


def _seconds_left(goodput: Goodput, num_steps: int) -> float | None:
    """Estimate the time left from the last start, including saves and evaluations."""
    start = goodput.starts[-1]
    first_step = start.first_step
    last_step = start.last_step
    if first_step is None or last_step is None or last_step <= first_step:
        return None
    one_time = ("start", "init", "prepare", "restore")
    seconds = start.seconds - sum(start.buckets.get(name, 0.0) for name in one_time)
    return (num_steps - last_step) * seconds / (last_step - first_step)


def _last_save(folder: epath.Path) -> Save | None:
    if not (steps := saved_steps(folder)):
        return None
    newest = folder / str(steps[-1])
    sealed = is_sealed(newest)
    saved_at = (newest / "digests.json").stat().mtime if sealed else 0
    # Object stores report 0 as the modification time.
    age_s = max(0.0, time.time() - saved_at) if saved_at else None
    return Save(steps[-1], sealed, age_s)


def _json_values(status: Status) -> dict[str, Any]:
    """Return the status as plain values for JSON, including derived figures."""
    goodput = status.goodput
    validation = status.validation
    return {
        **dataclasses.asdict(status),
        "validation": validation.last
        and validation.best
        and {
            "last": validation.last._asdict(),
            "best": validation.best._asdict(),
        },
        "validation_whole": validation.whole and validation.whole._asdict(),
        "goodput": {
            "fraction": goodput.fraction,
            "wall_s": goodput.wall_s,
            "num_wasted": goodput.num_wasted,
            "buckets": goodput.buckets,
        },
        "starts": [dataclasses.asdict(start) for start in goodput.starts],
    }


def _format_step(step: int | None) -> str:
    return "-" if step is None else f"{step:,}"


def _print_status(status: Status) -> None:
    state = status.state
    save = status.save
    goodput = status.goodput
    if status.owner:
        state += f", {status.owner}"
    if status.silent_s is not None:
        state += f", last record {format_seconds(status.silent_s)} ago"
    print(f"state       {state}")
    time_left = f", {format_seconds(status.left_s)} left" if status.left_s else ""
    print(f"step        {status.step:,} of {status.num_steps:,}{time_left}")
    print(f"loss        {'none yet' if status.loss is None else f'{status.loss:.4f}'}")
    last, best, _, whole = status.validation
    if last and best:
        print(f"validation  {last} at step {last.step:,}")
        if best.step != last.step:
            print(f"best        {best} at step {best.step:,}")
    if whole:
        print(f"whole set   {whole} at step {whole.step:,}")
    if save:
        age = "" if save.age_s is None else f", {format_seconds(save.age_s)} ago"
        sealed = "sealed" if save.sealed else "not sealed"
        print(f"last save   step {save.step:,}{age}, {sealed}")
    else:
        print("last save   none yet")
    if not goodput.starts:
        return
    running_start = goodput.starts[-1] if status.owner else None
    print(f"goodput     {str(goodput).splitlines()[0]}\n")
    starts = [
        [
            start.number,
            *map(_format_step, (start.first_step, start.last_step)),
            *(format_seconds(start.idle_s), format_seconds(start.seconds)),
            "running" if start is running_start else meaning(start.code),
        ]
        for start in goodput.starts
    ]
    headers = ["start", "from step", "to step", "after", "took", "end"]
    print_table(starts, headers, "starts")
    print()
    buckets = [
        [BUCKETS[name], format_seconds(seconds), f"{seconds / goodput.wall_s:.1%}"]
        for name, seconds in goodput.buckets.items()
    ]
    print_table(buckets, ["", "total", "share"], "wall time")


COMMAND = Command(main, "status", StatusConfig, status_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
