"""Parts of a start, as a value. No other module of a start names them."""

from collections.abc import Mapping

from data.config import DataConfig
from model.config import ModelConfig
from model.execution import Execution
from train.config import EvalConfig
from train.describe import describe_data, describe_program
from train.distributed.joining import join
from train.evaluate.results import compute_results, print_results
from train.run.profiles import Profiler
from train.start_parts import ChooseLayout, InitialWeights, MakeTasks, StartParts


def _initial_weights() -> InitialWeights:
    from train.pretrained import begin

    return begin


def _load_tasks(section: EvalConfig) -> MakeTasks:
    from train.evaluate.tasks import load_configured_tasks

    return load_configured_tasks(section)


def _layout_chooser() -> ChooseLayout:
    from train.plan.search.search import with_best_layout

    return with_best_layout


def _check_kernels(
    model: ModelConfig, data: DataConfig, execution: Execution
) -> Mapping[str, str]:
    from train.prove.kernels import check_kernels

    return check_kernels(model, data, execution)


START_PARTS = StartParts(
    initial_weights=_initial_weights,
    load_tasks=_load_tasks,
    layout_chooser=_layout_chooser,
    check_kernels=_check_kernels,
    join=join,
    describe_program=describe_program,
    describe_data=describe_data,
    open_profiler=Profiler,
    compute_results=compute_results,
    print_results=print_results,
)
