"""`python -m train.profile run.dir=...`: show how the time of a step is spent."""

import gzip
import os
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated

from etils import epath
from typing_extensions import Doc

from data.errors import Mistake
from train.cli.command import Command, run_command
from train.cli.rules import must_name_run
from train.config import Config, Count, RunConfig, Seconds
from train.errors import CRASHED, ConfigError, Exit
from train.identity import run_dir

_REMEDY = "Delete the folder of this profile, and ask for another one."
_POLL_S = 0.5


@dataclass(frozen=True)
class ProfileConfig:
    """Keys of `python -m train.profile`."""

    run: RunConfig = field(default_factory=RunConfig)
    num_steps: Annotated[Count, Doc("The number of steps to trace.")] = 5
    step: Annotated[
        Count | None,
        Doc("Show the profile that begins at this step. null requests a new one."),
    ] = None
    timeout_s: Annotated[
        Seconds, Doc("How long to wait for the trainer, in seconds.")
    ] = 900.0


def main(config: ProfileConfig) -> int:
    """Request a profile, or read an existing one, and print how the time was spent.

    Raises:
        ConfigError: if the run or profile does not exist, or the run is not training.
        Exit: if the trainer does not answer, or has ended.
    """
    from data.names import numbers_in
    from train.run.starts import existing_run

    folder = existing_run(run_dir(Config(run=config.run)))
    profile = folder / "profiles" / str(config.step)
    if config.step is None:
        profile = _request(folder, config)
    elif not (profile / "profile.json").exists():
        names = (file.parent.name for file in folder.glob("profiles/*/profile.json"))
        existing = ", ".join(map(str, numbers_in(names))) or "none"
        rule = f"must be the first step of an existing profile: {existing}"
        raise ConfigError([Mistake("step", config.step, rule)])
    _print_profile(profile)
    return 0


def _request(folder: epath.Path, config: ProfileConfig) -> epath.Path:
    """Write a request into the run's folder and wait for the profile."""
    from train.run.lease import read_owner
    from train.run.profiles import find_profile, request_profile, withdraw_request

    owner = read_owner(os.fspath(folder))
    if owner is None or owner.alive() is False:
        rule = "must name a run that is training now, and no process trains this one. "
        rule += "Start it, or set profile.steps=[first,last] for its next start"
        raise ConfigError([Mistake("run.dir", str(folder), rule)])
    token = request_profile(folder, config.num_steps)
    start = time.monotonic()
    try:
        while (profile := find_profile(folder, token)) is None:
            time.sleep(_POLL_S)
            if owner.alive() is False:
                raise Exit(CRASHED, f"{owner} ended before it answered")
            if time.monotonic() - start > config.timeout_s:
                message = f"{owner} has not answered for timeout_s={config.timeout_s:g}"
                raise Exit(CRASHED, f"{message}: it may be compiling, or stuck")
        return profile
    finally:
        withdraw_request(folder)


def _print_profile(folder: epath.Path) -> None:
    """Print how the time of the traced steps was spent, by scope and by kind."""
    from data.storage import check_regular
    from train.console import print_table
    from train.profile.times import read_times
    from train.records import damaged, read_record

    record = read_record(folder / "profile.json", _REMEDY) or {}
    numbers = [record.get(key) for key in ("first", "last", "seconds")]
    if not all(isinstance(number, int | float) for number in numbers):
        raise damaged(folder / "profile.json", "does not say its steps", _REMEDY)
    num_steps = record["last"] - record["first"] + 1
    hlo_file = folder / "step.hlo.gz"
    try:
        check_regular(hlo_file)
        hlo = gzip.decompress(hlo_file.read_bytes()).decode()
        if not hlo:
            raise ValueError("it is empty")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise damaged(hlo_file, f"cannot be read ({error})", _REMEDY) from None
    times, num_devices = read_times(folder, hlo)
    total_s = sum(times.values())
    print(f"profile     {folder}")
    mean = _format_ms(record["seconds"] / num_steps)
    print(f"steps       {record['first']:,} to {record['last']:,}, {mean} each")
    print(f"devices     {num_devices}\n")
    for column, title in enumerate(("scope", "kind")):
        sums = defaultdict[str, float](float)
        for label, seconds in times.items():
            sums[label[column]] += seconds
        rows = [
            [name, _format_ms(seconds / num_steps), f"{seconds / total_s:.1%}"]
            for name, seconds in sorted(sums.items(), key=lambda row: -row[1])
        ]
        print_table(rows, [title, "a step", "share"], f"by {title}, mean over devices")
        print()


def _format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"


COMMAND = Command(main, "profile", ProfileConfig, must_name_run)

if __name__ == "__main__":
    run_command(COMMAND)
