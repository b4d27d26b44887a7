"""Check that all processes can run the same program, before anything is written.

Config, code, library versions, device kinds and data must be the same on all processes.
"""

import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial

import jax
from etils import epath

from data.batches import Order
from data.catalog import text_store
from data.encoding import padded_vocab_size
from data.errors import DataError
from data.sources import Sources, encoding_of, open_sets, open_sources
from train.config import Config, DistributedConfig
from train.distributed.processes import Cluster
from train.errors import ConfigError, check_all
from train.identity import run_dir
from train.resolve.phases import phase_programs
from train.resolve.program import ConfiguredProgram, make_program, settle
from train.run.versions import code_version, versions
from train.start_parts import StartParts, TaskScores


def settled_run_dir(config: Config) -> str:
    """Return the run's directory, whose default name depends on the vocabulary too.

    If the vocabulary cannot be read, `Prepared` raises the error later.
    """
    try:
        encoding = encoding_of(config.data)
    except (ConfigError, DataError):
        return run_dir(config)
    return run_dir(settle(config, padded_vocab_size(encoding)))


class Prepared:
    """A config's program and data, after all processes have agreed on them.

    config: the config, with the vocabulary size and the layout filled in.
    devices_s: the monotonic times before and after JAX found the devices.
    """

    config: Config
    cluster: Cluster
    devices_s: tuple[float, float]
    program: ConfiguredProgram
    sources: Sources
    tasks: TaskScores | None = None

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        parts: StartParts,
        beat: Callable[[], object] = lambda: None,
    ):
        """Prepare the program and the data, and compare them across processes.

        `parts` are the optional parts that the config may ask for. `beat` is called for
        each piece of text that is encoded, and on all processes while process 0
        searches for a layout.

        Raises:
            ConfigError: if the config does not fit the devices or the data.
            DataError: if the data is missing or damaged.
            Exit: if processes differ.
        """
        self.config = config
        self.cluster = cluster
        self._parts = parts
        self._beat = beat
        cluster.agree(self._settle)
        cluster.agree(self._find_devices)
        if self.config.mesh.planned:
            self.config = parts.layout_chooser()(self.config, cluster, beat)
        cluster.agree(self._build)

    def _settle(self) -> Mapping[str, str]:
        """Settle the config; return the versions of config, code and libraries."""
        self._make_tasks = None
        if self.config.eval.tasks:
            self._make_tasks = self._parts.load_tasks(self.config.eval)
        encoding = encoding_of(self.config.data)
        vocab_size = padded_vocab_size(encoding)
        self._num_tokens = encoding.n_vocab
        self._check_vocab = partial(settle, self.config, vocab_size, self._num_tokens)
        if self.config.mesh.planned:
            self._check_vocab()  # Fail before the search, which takes minutes.
        self.config = settle(self.config, vocab_size)
        # Each process has its own process_id.
        shared = replace(self.config, distributed=DistributedConfig())
        text = json.dumps(asdict(shared), sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        program = {"config": digest[:12], "code": code_version()}
        return program | {"Python": platform.python_version()} | versions()

    def _find_devices(self) -> Mapping[str, str]:
        start_s = time.monotonic()
        jax.devices()
        self.devices_s = start_s, time.monotonic()
        kinds = Counter(device.device_kind for device in jax.local_devices())
        return {"devices": ", ".join(f"{n} x {kind}" for kind, n in kinds.items())}

    def _build(self) -> Mapping[str, str]:
        self.program, _ = check_all(
            lambda: make_program(self.config, num_tokens=self._num_tokens),
            self._check_vocab,
        )
        make = partial(make_program, num_tokens=self._num_tokens)
        phase_programs(self.program, make)
        data = self.config.data
        paths = self.config.eval.paths
        sources = open_sources(data, text_store, self._beat)
        self.sources = open_sets(sources, data, paths, text_store, self._beat)
        task_fingerprints = {}
        if self._make_tasks is not None:
            self.tasks = self._make_tasks(self.program, self.sources.encoding)
            task_fingerprints = {"eval.tasks": self.tasks.fingerprint[:12]}
        order = Order(self.sources, data, self.config.seed)
        if mistakes := order.epoch_mistakes(self.config.train.num_steps):
            raise ConfigError(mistakes)
        sets = {name: store.fingerprint for name, store in self.sources.sets.items()}
        fingerprints = {**self.sources.fingerprints, **sets}
        data_fingerprints = {f"data {name}": str(x) for name, x in fingerprints.items()}
        return data_fingerprints | task_fingerprints

    def check_initial_weights(self, folder: epath.Path) -> None:
        """Check the weights of `init_from` if the run in a folder has not begun.

        Raises:
            ConfigError: if the weights do not fit the model; lists every difference.
            DataError: if the weights are damaged.
            Exit: if processes see different weights.
        """
        path = self.config.init_from
        if path is not None and not (folder / "config.yaml").exists():
            weights = self._parts.initial_weights()
            self.cluster.agree(lambda: weights.check_weights(path, self.program))
