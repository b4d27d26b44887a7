"""The optional parts of a start, as a value. No other module of a start names them."""

from collections.abc import Callable, Mapping

from model.execution import Execution
from train.config import Config, EvalConfig
from train.distributed.processes import Cluster
from train.start_parts import InitialWeights, MakeTasks, StartParts


def _initial_weights() -> InitialWeights:
    from train.pretrained import begin

    return begin


def _load_tasks(section: EvalConfig) -> MakeTasks:
    from train.evaluate.tasks import load_configured_tasks

    return load_configured_tasks(section)


def _choose_layout(
    config: Config, cluster: Cluster, beat: Callable[[], object]
) -> Config:
    from train.plan.search.search import with_best_layout

    return with_best_layout(config, cluster, beat)


def _check_kernels(config: Config, execution: Execution) -> Mapping[str, str]:
    from train.prove.kernels import check_kernels

    return check_kernels(config, execution)


START_PARTS = StartParts(
    initial_weights=_initial_weights,
    load_tasks=_load_tasks,
    choose_layout=_choose_layout,
    check_kernels=_check_kernels,
)
