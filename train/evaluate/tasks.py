"""Benchmarks: a model judged by tasks of lm-evaluation-harness.

A task is one of the harness, or a YAML file in `task_path`. All mistakes in tasks are
reported when they are loaded, before the run begins. The results are numbers by name:
`tasks/<task>/<metric>`, and its standard error `..._stderr`.
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
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from tiktoken import Encoding

from train.errors import ConfigError, Mistake, as_typed
from train.program import Program

_SEED = 1234  # the seed of the few-shot examples, as in the harness' own commands
_HUB_S = 3.0  # how long to wait for the hub of data sets
_DRAWS = 1000  # of examples, for the standard error of what is not a mean


class Asked(NamedTuple):
    """Which tasks, and how.

    path: a folder of task files.
    limit: examples of each task; below 1: this part of them; None: all.
    num_fewshot: examples that are shown first; None: as the task says.
    key: of the config, for messages.
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


def load_tasks(asked: Asked) -> dict[str, Any]:
    """Load tasks with their examples, as the harness' `TaskDict`.

    Raises:
        ConfigError: if the harness is not installed, or a task cannot be loaded.
    """
    if find_spec("lm_eval") is None:
        rule = 'needs lm-evaluation-harness; pip install -e ".[eval]"'
        raise ConfigError([Mistake(asked.key, [*asked.names], rule)])
    # Read when it is imported: no bars, and no forks, which would copy JAX's threads.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    if not _hub_answers():  # each data set would be asked for again and again
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # It warns of each default that a task file leaves in force.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    loaded: Any = None
    try:
        manager = TaskManager(include_path=asked.path, include_defaults=False)
        if not {*asked.names} <= {*manager.all_tasks}:
            manager = TaskManager(include_path=asked.path)  # lists thousands
        unknown = [name for name in asked.names if name not in manager.all_tasks]
        if not unknown:
            loaded = manager.load([*asked.names])
    except Exception as error:  # many libraries are called
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        rule = f"cannot be loaded ({reason}). Without a network only data sets serve "
        rule += "that are on this machine: load the task once where there is one, or "
        rule += f"take task files of your own ({asked.path_key})"
        raise ConfigError([Mistake(asked.key, [*asked.names], rule)]) from error
    if unknown:
        rule = "is no task of lm-evaluation-harness (lm-eval ls tasks), nor of the "
        rule += f"folder {asked.path_key}={as_typed(asked.path)}"
        raise ConfigError([Mistake(asked.key, name, rule) for name in unknown])
    for task in loaded["tasks"].values():
        # A task that says 0 keeps it, as with the harness' own command.
        task_fewshot = task.config.num_fewshot
        replaced = asked.num_fewshot is not None and task_fewshot != 0
        if task_fewshot is None or replaced:
            task.set_config("num_fewshot", asked.num_fewshot or 0)
    return dict(loaded)


def _hub_answers() -> bool:
    """Whether data sets can be fetched, as far as that is known in seconds."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if hub.scheme in getproxies():
        return True
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        socket.create_connection((hub.hostname or "", port), _HUB_S).close()
    except OSError:
        return False
    return True


class Tasks:
    """Loaded tasks, and the program that they judge."""

    def __init__(
        self, loaded: dict[str, Any], asked: Asked, program: Program, encoding: Encoding
    ):
        """Prepare to judge; nothing is compiled yet.

        Raises:
            ConfigError: if a task asks for what is not there.
        """
        from train.evaluate.harness import HarnessModel

        self._loaded = loaded
        self._limit: Any = asked.limit  # the harness takes parts, but says it does not
        self._model = HarnessModel(program, encoding)
        length = self._model.max_length
        if mistakes := _mistakes(loaded["tasks"], asked.key, length):
            raise ConfigError(mistakes)

    @property
    def fingerprint(self) -> str:
        """The hash of what all processes must ask: the examples, and the harness."""
        digest = hashlib.sha256(version("lm_eval").encode())
        for name, task in self._loaded["tasks"].items():
            digest.update(f"{name} {task.config.num_fewshot}".encode())
            for example in itertools.islice(task.eval_docs, self._count(task)):
                digest.update(repr(example).encode())
        return digest.hexdigest()

    @property
    def num_examples(self) -> int:
        """How many examples all tasks ask."""
        return sum(map(self._count, self._loaded["tasks"].values()))

    def _count(self, task: Any) -> int:
        from lm_eval.evaluator_utils import get_sample_size

        available = len(task.eval_docs)
        return min(available, get_sample_size(task, self._limit) or available)

    def scores(
        self, params: Any, beat: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Judge parameters by all tasks; the same on all processes.

        Args:
            params: sharded as the program's.
            beat: called after each batch.
        """
        from lm_eval.evaluator import evaluate

        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(_SEED)  # drawn from: the same each time
        self._model.params, self._model.beat = params, beat
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
            results = evaluate(
                self._model,
                self._loaded,
                limit=self._limit,
                bootstrap_iters=_DRAWS,
                log_samples=False,
            )
        self._model.params = None  # no longer than needed
        assert results is not None
        return task_metrics(results)


def _mistakes(tasks: Mapping[str, Any], key: str, length: int) -> list[Mistake]:
    """List what tasks ask for that is not there."""
    from train.evaluate.harness import generation

    mistakes = []
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            rule = "runs code of the model's, or shows it images; leave it out"
            mistakes.append(Mistake(key, name, rule))
        if task.OUTPUT_TYPE != "generate_until":
            continue
        settings = generation(task.config.generation_kwargs or {})
        if settings.num_tokens >= length:
            rule = f"asks for texts of {settings.num_tokens} tokens, but must leave "
            rule += f"room for a prompt within data.sequence_length={length}; lower "
            rule += "its generation_kwargs.max_gen_toks"
            mistakes.append(Mistake(key, name, rule))
        if settings.unknown:
            rule = f"asks for {', '.join(settings.unknown)} of its texts, which only "
            rule += "know until, max_gen_toks, do_sample, temperature, top_k and top_p"
            mistakes.append(Mistake(key, name, rule))
    return mistakes


def task_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the harness' results as numbers by name, without the parts of a group.

    `exact_match,strict-match` of gsm8k becomes `tasks/gsm8k/exact_match/strict-match`;
    a filter `none` is left out.
    """
    groups, subtasks = results.get("groups", {}), results["group_subtasks"]
    parts = {part for group in groups for part in subtasks.get(group, ())}
    metrics = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if task in parts or not chosen or not isinstance(value, int | float):
                continue
            name = f"tasks/{task}/{metric}" + f"/{chosen}" * (chosen != "none")
            # Every tracker accepts these characters.
            metrics[re.sub(r"[^\w./ -]", "_", name)] = float(value)
    return metrics
