"""Score a model on tasks of lm-evaluation-harness.

A task is part of the harness or a YAML file in `task_path`. All mistakes in tasks are
reported when the tasks are loaded, before the run begins. The results are numbers by
name: `tasks/<task>/<metric>`, and the standard error `tasks/<task>/<metric>_stderr`.
"""

import contextlib
import hashlib
import io
import itertools
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from tiktoken import Encoding

from data.errors import Mistake
from train.config import EvalConfig
from train.errors import ConfigError, as_typed
from train.resolve.program import ConfiguredProgram

_SEED = 1234  # seed of few-shot examples, as in the harness' command
_HUB_TIMEOUT_S = 3.0  # the timeout for a connection to the hub of data sets
_NUM_RESAMPLES = 1000  # resamples for the standard errors of metrics that are not means


class TaskRequest(NamedTuple):
    """The tasks to score, and their settings.

    path: a folder of further task files.
    limit: the number of examples of each task, or their fraction if below 1; None: all.
    num_fewshot: the number of examples in each prompt; None: the task's own number.
    key: the key in the config that names the tasks, for messages.
    """

    names: Sequence[str]
    path: str | None
    limit: float | None
    num_fewshot: int | None
    key: str = "tasks"

    @property
    def path_key(self) -> str:
        """The key of the folder of task files, in the same section as `key`."""
        return f"{self.key.removesuffix('tasks')}task_path"


def load_tasks(request: TaskRequest) -> dict[str, Any]:
    """Load tasks with their examples, and return the harness' `TaskDict`.

    Raises:
        ConfigError: if the harness is not installed, or a task cannot be loaded.
    """
    if find_spec("lm_eval") is None:
        rule = 'needs lm-evaluation-harness; pip install -e ".[eval]"'
        raise ConfigError([Mistake(request.key, [*request.names], rule)])
    # The harness reads these when it is imported. It must not fork: JAX has threads.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    if not _hub_answers():  # The harness would retry each data set many times.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The harness warns of each default that a task file does not override.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    task_dict: Any = None
    try:
        manager = TaskManager(include_path=request.path, include_defaults=False)
        if not {*request.names} <= {*manager.all_tasks}:
            manager = TaskManager(include_path=request.path)  # Slow: thousands of tasks
        unknown = [name for name in request.names if name not in manager.all_tasks]
        if not unknown:
            task_dict = manager.load([*request.names])
    except Exception as error:  # Libraries that load data sets raise many types.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        rule = f"cannot be loaded ({reason}). Without a network, only data sets on "
        rule += "this machine can be used. Load the task once with a network, or use "
        rule += f"your own task files ({request.path_key})"
        raise ConfigError([Mistake(request.key, [*request.names], rule)]) from error
    if unknown:
        rule = "is no task of lm-evaluation-harness (lm-eval ls tasks), nor of the "
        rule += f"folder {request.path_key}={as_typed(request.path)}"
        raise ConfigError([Mistake(request.key, name, rule) for name in unknown])
    for task in task_dict["tasks"].values():
        # A task that sets num_fewshot=0 is not changed, as in the harness' command.
        task_fewshot = task.config.num_fewshot
        is_replaced = request.num_fewshot is not None and task_fewshot != 0
        if task_fewshot is None or is_replaced:
            task.set_config("num_fewshot", request.num_fewshot or 0)
    return dict(task_dict)


def load_configured_tasks(
    section: EvalConfig,
) -> Callable[[ConfiguredProgram, Encoding], "Tasks"]:
    """Load `eval.tasks`; return a function that makes them for a program.

    Raises:
        ConfigError: as in `load_tasks`.
    """
    request = TaskRequest(
        section.tasks,
        path=section.task_path,
        limit=section.task_limit,
        num_fewshot=section.task_num_fewshot,
        key="eval.tasks",
    )
    return partial(Tasks, load_tasks(request), request)


def _hub_answers() -> bool:
    """Return whether the hub of data sets accepts a connection, or a proxy is set."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if hub.scheme in getproxies():
        return True
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        socket.create_connection((hub.hostname or "", port), _HUB_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class Tasks:
    """Loaded tasks, and the program that is scored on them."""

    def __init__(
        self,
        task_dict: dict[str, Any],
        request: TaskRequest,
        program: ConfiguredProgram,
        encoding: Encoding,
    ):
        """Create the harness' model without compiling it.

        Raises:
            ConfigError: if a task needs an unsupported feature.
        """
        from train.evaluate.harness import HarnessModel

        self._task_dict = task_dict
        self._limit: Any = request.limit  # The harness accepts float, but declares int.
        self._model = HarnessModel(program, encoding)
        length = self._model.max_length
        if mistakes := _task_mistakes(task_dict["tasks"], request.key, length):
            raise ConfigError(mistakes)

    @property
    def fingerprint(self) -> str:
        """A hash of the examples and the harness' version, equal on all processes."""
        digest = hashlib.sha256(version("lm_eval").encode())
        for name, task in self._task_dict["tasks"].items():
            digest.update(f"{name} {task.config.num_fewshot}".encode())
            for example in itertools.islice(task.eval_docs, self._num_examples(task)):
                digest.update(repr(example).encode())
        return digest.hexdigest()

    @property
    def num_examples(self) -> int:
        """The number of examples of all tasks."""
        return sum(map(self._num_examples, self._task_dict["tasks"].values()))

    def _num_examples(self, task: Any) -> int:
        from lm_eval.evaluator_utils import get_sample_size

        available = len(task.eval_docs)
        return min(available, get_sample_size(task, self._limit) or available)

    def score(
        self, params: Any, heartbeat: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return the metrics of parameters on all tasks, the same on all processes.

        Args:
            params: sharded as `program.shardings.params`.
            heartbeat: called after each batch.
        """
        from lm_eval.evaluator import evaluate

        for task in self._task_dict["tasks"].values():
            task.set_fewshot_seed(_SEED)  # Earlier calls advanced the generator.
        self._model.params = params
        self._model.heartbeat = heartbeat
        with contextlib.redirect_stdout(io.StringIO()):  # The harness prints progress.
            results = evaluate(
                self._model,
                self._task_dict,
                limit=self._limit,
                bootstrap_iters=_NUM_RESAMPLES,
                log_samples=False,
            )
        self._model.params = None  # Release the memory.
        assert results is not None
        return task_metrics(results)


def _task_mistakes(tasks: Mapping[str, Any], key: str, length: int) -> list[Mistake]:
    """List the unsupported features that tasks need."""
    from train.evaluate.harness import parse_generation

    mistakes = []
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            rule = "runs code that the model writes, or shows images; leave it out"
            mistakes.append(Mistake(key, name, rule))
        if task.OUTPUT_TYPE != "generate_until":
            continue
        settings = parse_generation(task.config.generation_kwargs or {})
        if settings.num_tokens >= length:
            rule = f"asks for texts of {settings.num_tokens} tokens, but must leave "
            rule += f"room for a prompt within data.sequence_length={length}; lower "
            rule += "its generation_kwargs.max_gen_toks"
            mistakes.append(Mistake(key, name, rule))
        if settings.unknown:
            rule = f"sets {', '.join(settings.unknown)} in generation_kwargs; allowed "
            rule += "are until, max_gen_toks, do_sample, temperature, top_k and top_p"
            mistakes.append(Mistake(key, name, rule))
    return mistakes


def task_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the harness' results as numbers by name, without subtasks of groups.

    `exact_match,strict-match` of gsm8k becomes `tasks/gsm8k/exact_match/strict-match`;
    the filter name `none` is left out.
    """
    groups = results.get("groups", {})
    subtasks = results["group_subtasks"]
    grouped = {task for group in groups for task in subtasks.get(group, ())}
    metrics = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            is_number = isinstance(value, int | float)
            if task in grouped or not filter_name or not is_number:
                continue
            suffix = "" if filter_name == "none" else f"/{filter_name}"
            name = f"tasks/{task}/{metric}{suffix}"
            # Every tracker accepts these characters.
            metrics[re.sub(r"[^\w./ -]", "_", name)] = float(value)
    return metrics
