"""The run's directory, its lease and its checkpoints."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt
from typing_extensions import Doc

from data.config import Count, Number
from train.config.bounds import Seconds


@dataclass(frozen=True)
class RunConfig:
    """The run: a directory with one history, owned by one start at a time."""

    name: Annotated[
        str | None,
        Doc(
            "The run's name. null derives it from the model, the data and a hash of "
            "the keys that a run may not change."
        ),
    ] = None
    dir: Annotated[
        str | None,
        Doc("The run's directory, also gs:// or s3://. null means runs/<name>."),
    ] = None
    allow_change: Annotated[
        list[str],
        Doc(
            "Keys or sections, otherwise fixed for a run, that this start may change, "
            "such as [data,seed]."
        ),
    ] = field(default_factory=list)
    rewind_to: Annotated[
        Number | None,
        Doc(
            "Continue from the newest checkpoint at or before this step. null means "
            "the newest checkpoint."
        ),
    ] = None
    lease_interval_s: Annotated[
        Seconds, Doc("The owner renews its lease on the run at this interval.")
    ] = 2.0
    lease_timeout_s: Annotated[
        Seconds, Doc("An owner that has not renewed its lease for this long is dead.")
    ] = 20.0


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and which are kept."""

    save_interval_steps: Annotated[Count, Doc("The number of steps between saves.")] = (
        500
    )
    save_interval_minutes: Annotated[
        float,
        Gt(0),
        Doc("A save also starts when the last one is this many minutes old."),
    ] = 10.0
    keep_latest: Annotated[
        Count,
        Doc("The number of newest checkpoints that are kept; older ones are deleted."),
    ] = 2
    keep_every_steps: Annotated[
        Count | None,
        Doc(
            "Checkpoints at multiples of this step are kept for good. null keeps none."
        ),
    ] = None
    keep_best: Annotated[
        bool,
        Doc(
            "Save after each evaluation with the lowest loss so far, and keep that "
            "checkpoint."
        ),
    ] = False
    max_failed_saves: Annotated[
        Number, Doc("The run ends when more saves than this fail in a row.")
    ] = 3
