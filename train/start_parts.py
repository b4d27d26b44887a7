"""The parts of a start that train/catalog.py hands in.

A start imports none of them. Most runs do without the first four, so the functions of
these import their part when a config asks for it. The others begin and end every start,
and training knows only what they return.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from etils import epath
from tiktoken import Encoding

from data.batches import Order
from data.config import DataConfig
from data.sources import Sources
from model.config import ModelConfig
from model.execution import Execution
from train.config import (
    Config,
    DistributedConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
)
from train.core.services import Profiler
from train.core.state import TrainState
from train.distributed.preemption import Preemption
from train.distributed.processes import Cluster
from train.evaluate.validation import Score
from train.resolve.program import ConfiguredProgram
from train.run.directory import RunDir


class InitialWeights(Protocol):
    """Begins a run with existing weights (train/pretrained/begin.py)."""

    def check_weights(self, path: str, program: ConfiguredProgram) -> dict[str, str]:
        """Compare weights with a model; return values that all processes agree on."""
        ...

    def record_or_check_files(
        self, path: str, run: epath.Path, cluster: Cluster
    ) -> None:
        """Record the digests of the weight files, or compare them with the record."""
        ...

    def start_from(self, path: str, program: ConfiguredProgram) -> TrainState:
        """Return the state of step 0 with these weights."""
        ...


class TaskScores(Protocol):
    """Scores parameters on the tasks of `eval.tasks` (train/evaluate/tasks.py)."""

    @property
    def fingerprint(self) -> str:
        """A hash of the examples, equal on all processes."""
        ...

    def score(
        self, params: Any, heartbeat: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return the metrics of parameters on all tasks."""
        ...


class ComputeResults(Protocol):
    """Computes the results of a finished run (train/evaluate/results.py)."""

    def __call__(
        self,
        program: ConfiguredProgram,
        params: Any,
        sources: Sources,
        step: int,
        evaluations: Mapping[str, Mapping[str, Score]],
    ) -> dict[str, Any]:
        """Return the results as JSON values; `evaluations` has scores by prefix."""
        ...


class PrintResults(Protocol):
    """Prints the results of a finished run (train/evaluate/results.py)."""

    def __call__(
        self,
        values: dict[str, Any],
        command: str,
        run_dir: epath.Path,
        schedule: ScheduleConfig,
        run: RunConfig,
    ) -> None:
        """Print results, goodput, and a command that continues training."""
        ...


class OpenRunProfiler(Protocol):
    """Opens what traces some steps of a run (train/run/profiles.py)."""

    def __call__(
        self,
        run: RunDir,
        cluster: Cluster,
        preemption: Preemption,
        text: Callable[[int], str],
        pause: Callable[[str], AbstractContextManager],
    ) -> Profiler:
        """Return the profiler; `text` and `pause` are those of `OpenProfiler`."""
        ...


MakeTasks = Callable[[ConfiguredProgram, Encoding], TaskScores]


ChooseLayout = Callable[[Config, Cluster, Callable[[], object]], Config]


JoinCluster = Callable[[DistributedConfig, str, Callable[[], None]], Cluster]


class StartParts(NamedTuple):
    """Functions of the parts of a start.

    initial_weights: returns what begins a run with the weights of `init_from`.
    load_tasks: loads `eval.tasks`; returns what makes them for a program.
    layout_chooser: returns what gives a config the best mesh, for mesh=planned.
    check_kernels: compares kernels with plain formulas (runtime.prove_kernels).
    join: finds the other processes of the run and connects to them.
    describe_program: prints a program before training.
    describe_data: prints the order of the data, given the number of steps.
    open_profiler: opens what traces steps, by `profile.steps` or on request.
    compute_results: samples from the finished weights and computes the results.
    print_results: prints the results.
    """

    initial_weights: Callable[[], InitialWeights]
    load_tasks: Callable[[EvalConfig], MakeTasks]
    layout_chooser: Callable[[], ChooseLayout]
    check_kernels: Callable[[ModelConfig, DataConfig, Execution], Mapping[str, str]]
    join: JoinCluster
    describe_program: Callable[[ConfiguredProgram], None]
    describe_data: Callable[[Order, int], None]
    open_profiler: OpenRunProfiler
    compute_results: ComputeResults
    print_results: PrintResults
