"""Functions for programs and notebooks that use Longhaul as a library.

They import JAX when they are called. `errors` describes what they raise.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from data.errors import Mistake
from longhaul.catalog import CATALOG, Catalog
from train.cli.compose import compose as compose_config
from train.cli.rules import config_mistakes
from train.config import Config, RunConfig, RuntimeConfig
from train.errors import ConfigError

if TYPE_CHECKING:
    from tiktoken import Encoding

    from data.batch import Batch
    from data.sources import Sources
    from model.gpt import GPT
    from train.resolve.program import ConfiguredProgram


class Run(NamedTuple):
    """A trained model.

    model: the module, with `jax.ShapeDtypeStruct` in place of its parameters; `bind`
        (model/gpt.py) puts parameters in.
    params: nested dicts of sharded arrays; averaged weights if the run averages them.
    config: the run's config.
    tokenizer: encodes and decodes text.
    step: the number of updates that the parameters have had.
    program: the program of the run on the devices of this process.
    sources: the run's data.
    """

    model: "GPT"
    params: Any
    config: Config
    tokenizer: "Encoding"
    step: int
    program: "ConfiguredProgram"
    sources: "Sources"


def compose(overrides: Sequence[str] = (), catalog: Catalog = CATALOG) -> Config:
    """Return the config of a command line such as `["model=gpt_nano", "seed=1"]`.

    Raises:
        ConfigError: with every mistake in the command line.
    """
    if mistakes := catalog.mistakes():
        raise ConfigError(mistakes)
    config = compose_config(overrides, "train", catalog.schema(Config))
    if mistakes := config_mistakes(config):
        raise ConfigError(mistakes)
    return config


def make_program(config: Config, target: str | None = None) -> "ConfiguredProgram":
    """Return the training program of a config.

    `program.init()` returns the state of step 0, and `program.train_step(state, batch)`
    the next state and metrics. All arrays are sharded as `program.shardings` says.

    Args:
        config: the config of training.
        target: a machine to `plan` for, such as v5e-64, which need not be available.
            None takes the devices of this process.

    Raises:
        ConfigError: the config does not fit the devices or the tokenizer, or there is
            no such target.
        DataError: the tokenizer or a store is missing or damaged.
    """
    import jax

    from data.encoding import padded_vocab_size
    from data.sources import encoding_of
    from train.hardware.devices import fake_devices, prepare
    from train.hardware.targets import parse_target
    from train.resolve.program import make_program as make
    from train.resolve.program import settle

    _set_up(config.runtime)
    devices = jax.devices()
    if target is not None:
        prepare()
        devices = fake_devices(parse_target(target))
    encoding = encoding_of(config.data)
    num_tokens = encoding.n_vocab
    config = settle(config, padded_vocab_size(encoding), num_tokens)
    return make(config, devices, num_tokens=num_tokens)


def batches(program: "ConfiguredProgram", start: int = 0) -> "Iterator[Batch]":
    """Return the batches of training from the step `start` on, for `train_step`.

    `inputs` and `targets` are int32 [B, T], sharded as `program.batch` says; a target
    of -1 does not count. A batch depends on the config and the step alone.

    Raises:
        ConfigError: the config changes the shape of batches while it trains.
        DataError: the data is missing or damaged.
    """
    from data.batches import Order
    from data.catalog import text_store
    from data.sources import open_sources
    from train.core.feed import local_rows, place

    config = program.config
    data = config.data
    for key in ("batch_schedule", "sequence_schedule"):
        if value := getattr(data, key):
            rule = "must be empty here, because a program has one shape of batches"
            raise ConfigError([Mistake(f"data.{key}", value, rule)])
    sources = open_sources(data, text_store, to_evaluate=False)
    order = Order(sources, data, config.seed)
    host_batches = order.batches(start, lambda phase: local_rows(program.batch))
    return (place(batch, program.batch) for batch in host_batches)


def load_run(
    directory: str,
    step: int | None = None,
    batch_size: int | None = None,
    catalog: Catalog = CATALOG,
) -> Run:
    """Load a trained model on the devices of this process.

    Args:
        directory: the directory of the run, local or gs:// or s3://.
        step: the step of the checkpoint; None takes the newest.
        batch_size: the number of rows that `evaluate` scores at once; None takes the
            run's.
        catalog: the parts that the run was trained with.

    Raises:
        ConfigError: there is no such run, or the catalog lacks a part of it.
        DataError: the data is not the run's, or the checkpoint is damaged.
    """
    from train.load_run import load_run as load

    run = RunConfig(dir=directory)
    schema = catalog.schema(Config)
    program, sources, loaded_step, params = load(
        run, RuntimeConfig(), step, batch_size, schema
    )
    return Run(
        model=program.model,
        params=params,
        config=program.config,
        tokenizer=sources.encoding,
        step=loaded_step,
        program=program,
        sources=sources,
    )


def sample(
    run: Run,
    prompts: Sequence[str],
    num_tokens: int = 100,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[str]:
    """Return a continuation of each prompt.

    Args:
        run: the model.
        prompts: texts, which may be empty.
        num_tokens: the most tokens of a continuation.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw from the k most likely tokens only; None draws from all.
        top_p: draw from the most likely tokens that together reach this probability.
        seed: the seed of the draws.
        stop: a continuation ends before the first of these texts.

    Raises:
        ConfigError: a prompt is too long for the model.
    """
    from data.beginning import beginning_of
    from train.sample.generate import Sampling
    from train.sample.prompts import continue_rows, prompt_rows

    beginning = beginning_of(run.config.data, run.tokenizer)
    return continue_rows(
        run.program,
        run.params,
        run.tokenizer,
        rows=prompt_rows(run.tokenizer, prompts, beginning),
        num_tokens=num_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        seed=seed,
        stop=stop,
    )


def evaluate(run: Run, num_batches: int = -1) -> dict[str, float]:
    """Return the scores of a model on the validation text of its run.

    `num_batches` are spread evenly over the text; -1 takes all of it. The names are
    those of metrics.jsonl, such as `eval/loss` and `eval/bits_per_byte`.
    """
    from train.evaluate.validation import are_whole, as_metrics, evaluate_all
    from train.run.validations import PART, WHOLE

    scores = evaluate_all(run.program, run.params, run.sources, num_batches)
    return as_metrics(scores, WHOLE if are_whole(scores) else PART)


def plan(program: "ConfiguredProgram") -> dict[str, Any]:
    """Return the layout, memory and predicted speed of training, as in plan.json.

    If the program is for a machine that is not available, and its compiler is
    installed, the program is compiled. Otherwise the figures are estimates.
    """
    import jax

    from train.hardware.devices import StandIn
    from train.plan.budget import budget_of
    from train.plan.plan import compile_and_read, estimate

    devices = [*program.mesh.devices.flat]
    device = devices[0]
    is_absent = device.platform != jax.default_backend()
    can_compile = is_absent and not isinstance(device, StandIn)
    read = compile_and_read if can_compile else estimate
    return read(program, budget=budget_of(devices)).as_json()


@functools.cache
def _set_up(runtime: RuntimeConfig) -> None:
    """Set up JAX once; the devices of a process cannot change afterwards."""
    from train.runtime import set_up

    set_up(runtime)
