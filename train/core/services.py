"""Protocols of the services that the training loop uses.

The loop knows no files, no processes and no formats. train/start.py hands it objects
with these methods; the docstring of each protocol names the module of their class.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from data.batch import Batch
from data.phases import Phase
from train.core.state import TrainState

SAVE = "save"  # The request to save a checkpoint after a step.


class Batches(Protocol):
    """The batches of a run, as a function of the step (data/batches.py)."""

    def batch_number(self, step: int) -> int:
        """Return the number of the batch that is trained on after `step` updates."""
        ...

    def phase(self, step: int) -> Phase:
        """Return the phase of that batch."""
        ...

    def batches(
        self, start_step: int, rows: Callable[[Phase], list[slice]], stop_step: int
    ) -> Iterator[Batch]:
        """Return an iterator over the batches of steps, read ahead.

        `rows` returns the slices of a global batch's rows that this process reads.
        """
        ...


class Saves(Protocol):
    """The checkpoints of a run (train/run/checkpoint.py)."""

    def due(self, step: int) -> bool:
        """Return whether a save is due after this step."""
        ...

    def due_by_time(self) -> bool:
        """Return whether the last save is too old."""
        ...

    def record_loss(self, step: int, loss: float, targets: int) -> bool:
        """Record a validation loss; return whether it must be saved as the best."""
        ...

    def save(
        self, step: int, state: TrainState, metadata: dict[str, Any], last: bool
    ) -> str | None:
        """Begin to save a state; return why this or the previous save failed."""
        ...


class Events(Protocol):
    """The events of a run, and how long each took (train/run/metrics.py)."""

    def lap(
        self, event: str, parts: Mapping[str, float] | None = None, **fields: Any
    ) -> None:
        """Record the time since the last lap, of which `parts` took a share."""
        ...

    def record(self, event: str, **fields: Any) -> None:
        """Record an event that takes no time."""
        ...


class Journal(Protocol):
    """The metrics and the events of a run (train/run/directory.py).

    write: whether this process writes them, and shows progress.
    """

    write: bool

    @property
    def events(self) -> Events:
        """The events of the run."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line of metrics."""
        ...

    def tokens_at(self, step: int) -> int:
        """Return the number of targets of the first `step` steps."""
        ...


class Peers(Protocol):
    """The processes of a run (train/distributed/peers.py)."""

    def wait_for_compilation(self) -> None:
        """Wait until every process has compiled the step."""
        ...

    def step_done(self, step: int) -> str | int | None:
        """Record a completed step; return what is due: an exit code, SAVE or None."""
        ...

    def request_save(self) -> None:
        """Ask all processes to save after the same step."""
        ...

    def inject_fault(self, step: int, state: TrainState) -> TrainState:
        """Return the state after a step, with the fault of a drill if one is due."""
        ...

    def find_corruption(self, state: TrainState) -> list[Any]:
        """Return the findings where replicas of an array are not bitwise equal."""
        ...


class Watch(Protocol):
    """Ends a process that makes no progress (train/distributed/watchdog.py)."""

    def phase(self, name: str, step: int | None = None) -> None:
        """Enter a phase, and restart its deadline."""
        ...

    def during(self, name: str) -> AbstractContextManager[None]:
        """Enter a phase for a block."""
        ...

    def pace(self, seconds_per_log_interval: float) -> None:
        """Adapt the deadline of a step to the duration of a log interval."""
        ...


class Validation(NamedTuple):
    """The scores of a state on the validation sets.

    metrics: the scores by their names in metrics.jsonl.
    line: the scores as a line for people.
    loss: nats per target of the validation split.
    num_targets: the number of targets of the validation split that were scored.
    """

    metrics: dict[str, float]
    line: str
    loss: float
    num_targets: int


class Scorer(Protocol):
    """Scores states while a run trains (train/evaluate/evaluator.py)."""

    def validate(self, step: int, params: Any) -> Validation:
        """Score parameters on the validation sets."""
        ...

    def score_tasks(self, params: Any) -> dict[str, float]:
        """Score parameters on `eval.tasks`; return {} if there are none."""
        ...


class Profiler(Protocol):
    """Traces some steps (train/run/profiles.py)."""

    def before(self, step: int) -> None:
        """Start to trace if this is the first step to profile."""
        ...

    def after(self, step: int, metrics: Any) -> None:
        """Stop to trace if this was the last step to profile."""
        ...

    def close(self) -> None:
        """Stop to trace."""
        ...


# Returns a profiler, given a function that returns the HLO text of a step, and one that
# excludes the time of a block from the step time.
OpenProfiler = Callable[
    [Callable[[int], str], Callable[[str], AbstractContextManager]], Profiler
]
