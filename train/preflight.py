"""Before anything is written: can all processes run this, and are they equal?

Config, code, library versions, kinds of devices and data must be the same on all.
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

from data.batches import Order
from data.encoding import padded_vocab_size
from data.sources import Sources, encoding_of, open_sets, open_sources
from train.config import Config, DistributedConfig
from train.distributed.processes import Cluster
from train.errors import ConfigError, Mistake, check_all
from train.evaluate.tasks import Asked, Tasks, load_tasks
from train.plan.search.candidates import Layout
from train.plan.search.search import choose
from train.program import Program, make_program, settle
from train.run.versions import code_version, versions


class Prepared:
    """The program and the data of a config, once all processes can run it.

    config: settled.
    devices_s: when the devices were asked for, and when they were there.
    """

    config: Config
    devices_s: tuple[float, float]
    program: Program
    sources: Sources
    tasks: Tasks | None = None

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        beat: Callable[[], object] = lambda: None,
    ):
        """Prepare both, before anything is written.

        `beat` is called for each piece of text that is encoded, and on all processes
        while process 0 looks for a layout.

        Raises:
            ConfigError: if the config does not fit the devices or the data.
            DataError: if the data is missing or damaged.
            Exit: if the processes are not equal.
        """
        self.config, self._beat = config, beat
        cluster.agree(self._settle)
        cluster.agree(self._find_devices)
        if self.config.mesh.planned:
            chosen = cluster.broadcast_progress(
                lambda beat: asdict(choose(self.config, jax.devices(), beat=beat)), beat
            )
            self.config = Layout(**chosen).applied(self.config)
        cluster.agree(self._lay_out)

    def _settle(self) -> Mapping[str, str]:
        self._loaded = None
        if names := self.config.eval.tasks:
            judge = self.config.eval
            how = judge.task_path, judge.task_limit, judge.task_num_fewshot
            self._asked = Asked(names, *how, "eval.tasks")
            self._loaded = load_tasks(self._asked)
        encoding = encoding_of(self.config.data)
        vocab = padded_vocab_size(encoding), encoding.n_vocab
        self._num_tokens = encoding.n_vocab
        self._check_vocab = partial(settle, self.config, *vocab)
        if self.config.mesh.planned:
            self._check_vocab()  # no layout is worth looking for
        self.config = settle(self.config, vocab[0])
        return _about_program(self.config)

    def _find_devices(self) -> Mapping[str, str]:
        asked = time.monotonic()
        jax.devices()
        self.devices_s = asked, time.monotonic()
        return _about_devices()

    def _lay_out(self) -> Mapping[str, str]:
        self.program, _ = check_all(
            lambda: make_program(self.config, num_tokens=self._num_tokens),
            self._check_vocab,
        )
        data = self.config.data
        sources, sets = open_sources(data, self._beat), self.config.eval.paths
        self.sources = open_sets(sources, data, sets, self._beat)
        tasks = {}
        if self._loaded:
            judged = self._asked, self.program, self.sources.encoding
            self.tasks = Tasks(self._loaded, *judged)
            tasks = {"eval.tasks": self.tasks.fingerprint[:12]}
        order = Order(self.sources, self.config.data, self.config.seed)
        if used_up := order.mistakes(self.config.train.num_steps):
            raise ConfigError([Mistake(*mistake) for mistake in used_up])
        return _about_data(self.sources) | tasks


def _about_program(config: Config) -> dict[str, str]:
    """Return the hashes of config and code, and the libraries' versions."""
    same = replace(config, distributed=DistributedConfig())  # the process' own number
    text = json.dumps(asdict(same), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    program = {"config": digest[:12], "code": code_version()}
    return program | {"Python": platform.python_version()} | versions()


def _about_devices() -> dict[str, str]:
    """Return kinds and number of this process' devices."""
    kinds = Counter(device.device_kind for device in jax.local_devices())
    return {"devices": ", ".join(f"{n} x {kind}" for kind, n in kinds.items())}


def _about_data(sources: Sources) -> dict[str, str]:
    """Return the fingerprint of each source and set."""
    sets = {name: store.fingerprint for name, store in sources.sets.items()}
    both = {**sources.fingerprints, **sets}
    return {f"data {name}": str(at) for name, at in both.items()}
