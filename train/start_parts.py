"""The optional parts of a start, which train/catalog.py lists.

A start imports none of them. Each function imports its part when a config asks for it,
because most runs do without.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from etils import epath
from tiktoken import Encoding

from data.config import DataConfig
from model.config import ModelConfig
from model.execution import Execution
from train.config import Config, EvalConfig
from train.core.state import TrainState
from train.distributed.processes import Cluster
from train.resolve.program import ConfiguredProgram


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


MakeTasks = Callable[[ConfiguredProgram, Encoding], TaskScores]


ChooseLayout = Callable[[Config, Cluster, Callable[[], object]], Config]


class StartParts(NamedTuple):
    """Functions that import the optional parts of a start.

    initial_weights: returns what begins a run with the weights of `init_from`.
    load_tasks: loads `eval.tasks`; returns what makes them for a program.
    layout_chooser: returns what gives a config the best mesh, for mesh=planned.
    check_kernels: compares kernels with plain formulas (runtime.prove_kernels).
    """

    initial_weights: Callable[[], InitialWeights]
    load_tasks: Callable[[EvalConfig], MakeTasks]
    layout_chooser: Callable[[], ChooseLayout]
    check_kernels: Callable[[ModelConfig, DataConfig, Execution], Mapping[str, str]]
