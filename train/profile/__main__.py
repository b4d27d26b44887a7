"""`python -m train.profile run.dir=...`: where the time of a running trainer goes."""

import gzip
import os
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field

from etils import epath

from train.cli.command import run_command
from train.cli.rules import must_name_run
from train.config import Config, RunConfig, Seconds
from train.errors import CRASHED, ConfigError, Exit, Mistake
from train.identity import run_dir
from train.watching import Count

_REMEDY = "Delete the folder of this profile, and ask for another one."
_POLL_S = 0.5
_DEVICES = "of each device, on average"


@dataclass(frozen=True)
class ProfileConfig:
    """Keys of `python -m train.profile`."""

    run: RunConfig = field(default_factory=RunConfig)
    num_steps: Count = 5  # steps to trace
    step: Count | None = None  # show the profile that begins there instead; null: ask
    timeout_s: Seconds = 900.0  # for the answer


def main(asked: ProfileConfig) -> int:
    """Ask for a profile, or take one that is there, and print where the time went.

    Raises:
        ConfigError: no such run, nobody trains it, or no such profile.
        Exit: the trainer does not answer, or is gone.
    """
    from train.run.starts import existing_run

    folder = existing_run(run_dir(Config(run=asked.run)))
    if asked.step is None:
        profile = _ask(folder, asked)
    else:
        profile = folder / "profiles" / str(asked.step)
        if not (profile / "profile.json").exists():
            there = (
                path.parent.name for path in folder.glob("profiles/*/profile.json")
            )
            steps = sorted(int(name) for name in there if name.isdigit())
            known = ", ".join(map(str, steps)) or "none"
            rule = f"must be the first step of a profile that is there: {known}"
            raise ConfigError([Mistake("step", asked.step, rule)])
    _show(profile)
    return 0


def _ask(folder: epath.Path, asked: ProfileConfig) -> epath.Path:
    """Leave a request, and wait until it is answered."""
    from train.run.lease import read_owner
    from train.run.profiles import answer, ask, withdraw

    owner = read_owner(os.fspath(folder))
    if owner is None or owner.alive() is False:
        rule = "must name a run that is training now, and nobody is at this one; start "
        rule += "it, or set profile.steps=[first,last] for its next start"
        raise ConfigError([Mistake("run.dir", str(folder), rule)])
    token, began = ask(folder, asked.num_steps), time.monotonic()
    try:
        while (found := answer(folder, token)) is None:
            time.sleep(_POLL_S)
            if owner.alive() is False:
                raise Exit(CRASHED, f"{owner} ended before it answered")
            if time.monotonic() - began > asked.timeout_s:
                rule = f"{owner} has not answered for timeout_s={asked.timeout_s:g}"
                raise Exit(CRASHED, f"{rule}: it may be compiling, or stuck")
        return found
    finally:
        withdraw(folder)


def _show(folder: epath.Path) -> None:
    """Print where the time of the traced steps went."""
    from train.console import print_table
    from train.profile.times import read_times
    from train.run.records import damaged, read_record

    done = read_record(folder / "profile.json", _REMEDY) or {}
    numbers = [done.get(key) for key in ("first", "last", "seconds")]
    if not all(isinstance(number, int | float) for number in numbers):
        raise damaged(folder / "profile.json", "does not say its steps", _REMEDY)
    steps = done["last"] - done["first"] + 1
    program = folder / "step.hlo.gz"
    try:
        text = gzip.decompress(program.read_bytes()).decode()
        if not text:
            raise ValueError("it is empty")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise damaged(program, f"cannot be read ({error})", _REMEDY) from None
    times, devices = read_times(folder, text)
    total = sum(times.values())
    print(f"profile     {folder}")
    of_each = _ms(done["seconds"] / steps)
    print(f"steps       {done['first']:,} to {done['last']:,}, {of_each} each")
    print(f"devices     {devices}\n")
    for column, title in enumerate(("scope", "kind")):
        sums = defaultdict[str, float](float)
        for label, seconds in times.items():
            sums[label[column]] += seconds
        rows = [
            [name, _ms(seconds / steps), f"{seconds / total:.1%}"]
            for name, seconds in sorted(sums.items(), key=lambda row: -row[1])
        ]
        print_table(rows, [title, "a step", "share"], f"by {title}, {_DEVICES}")
        print()


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"


if __name__ == "__main__":
    run_command(main, "profile", ProfileConfig, must_name_run)
