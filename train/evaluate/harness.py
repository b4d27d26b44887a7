"""The model interface of lm-evaluation-harness: score and continue texts.

The harness calls a `TemplateLM`, and decides how a task becomes requests and how
answers become metrics. Each process gets the same requests and calls the devices in the
same order.

Chat templates, images and several requests in one row of a batch are not supported.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from tiktoken import Encoding

from data.batch import Batch
from data.beginning import beginning_of
from data.encoding import END_OF_TEXT, encode
from train.core.eval_step import make_score_step
from train.core.feed import local_rows, place
from train.core.program import Program
from train.resolve.program import ConfiguredProgram
from train.sample.generate import Sampling
from train.sample.prompts import continue_rows

_BLOCK = 128  # Every attention kernel accepts rows of any multiple of this length.


class ScoredWindow(NamedTuple):
    """Tokens to score and their prefix, which fit in one row."""

    request: int  # the number of the request
    prefix: list[int]
    tokens: list[int]

    @property
    def length(self) -> int:
        """The number of positions that the window takes in a row."""
        return len(self.prefix) + len(self.tokens) - 1


class HarnessModel(TemplateLM):
    """A program with parameters; callers may replace `params` and `heartbeat`.

    Each request is scored in a separate row, padded to one of a few lengths. Contexts
    that are too long are truncated at their start. Texts begin as documents do in
    training: an empty context becomes the beginning token.
    """

    def __init__(self, program: ConfiguredProgram, encoding: Encoding):
        """Create the scoring step without compiling it."""
        super().__init__()
        self.params: Any = None
        self.heartbeat: Callable[[], None] = lambda: None
        self._program = program
        self._encoding = encoding
        config = program.config
        self._beginning = beginning_of(config.data, encoding)
        self.max_length = config.data.sequence_length
        # One microbatch of training, which fits in memory.
        self._num_rows = config.data.batch_size // config.train.accumulation_steps
        self._lengths = row_lengths(self.max_length, program)
        self._step = jax.jit(
            make_score_step(
                program.model, program.execution, program.recipe, encoding.n_vocab
            ),
            in_shardings=(program.shardings.params, program.batch_shardings),
            out_shardings=program.replicated,
        )

    @property
    def eot_token_id(self) -> int:
        """The id of the end-of-text token, which separates documents."""
        return self._encoding.eot_token

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that stands for an empty context."""
        return self._beginning.token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text, after the BOS token of an imported tokenizer that adds one.

        The harness passes `add_special_tokens=False` for a text that has another one
        before it. Special tokens in the text are not recognised.
        """
        ids = encode(self._encoding, string.encode()).tolist()
        has_bos = self._beginning.in_prompts and add_special_tokens is not False
        return [self._beginning.token, *ids] if has_bos else ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score texts like `_loglikelihood_tokens`, without a progress bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether each token is argmax.

        A continuation longer than a row is scored in several windows.
        """
        nats = np.zeros(len(requests))
        misses = np.zeros(len(requests))
        windows = [
            window
            for i, (_, context, tokens) in enumerate(requests)
            for window in split_into_windows(
                i, context or [self.prefix_token_id], tokens, self.max_length
            )
        ]
        windows.sort(key=lambda window: -window.length)
        for start in range(0, len(windows), self._num_rows):
            chunk = windows[start : start + self._num_rows]
            numbers = [window.request for window in chunk]
            row_nats, row_misses = self._score(chunk)
            np.add.at(nats, numbers, row_nats[: len(chunk)])
            np.add.at(misses, numbers, row_misses[: len(chunk)])
            self.heartbeat()
        return list(zip((-nats).tolist(), (misses == 0).tolist(), strict=True))

    def _score(self, windows: Sequence[ScoredWindow]) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's nats and argmax misses; the last rows may be padding."""
        longest = max(window.length for window in windows)
        length = min(length for length in self._lengths if length >= longest)
        shape = self._num_rows, length
        inputs = np.zeros(shape, np.int32)
        segment_ids = np.zeros(shape, np.int32)
        targets = np.full(shape, -1, np.int32)
        for row, window in enumerate(windows):
            stop = window.length
            inputs[row, :stop] = [*window.prefix, *window.tokens][:-1]
            targets[row, stop - len(window.tokens) : stop] = window.tokens
            segment_ids[row, :stop] = 1
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
        structs = jax.tree.map(lambda x: x.update(shape=shape), self._program.batch)
        row_numbers = [np.arange(self._num_rows)[rows] for rows in local_rows(structs)]
        batch = Batch(inputs, targets, segment_ids, positions)
        batch = jax.tree.map(lambda x: x[np.concatenate(row_numbers)], batch)
        nats, misses = jax.device_get(self._step(self.params, place(batch, structs)))
        return nats, misses

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, with each token scored once."""
        prefix = [self.prefix_token_id]
        encode_text = partial(self.tok_encode, add_special_tokens=False)
        texts = [(None, prefix, encode_text(r.args[0])) for r in requests]
        return [score for score, _ in self._loglikelihood_tokens(texts)]

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Return each text's continuation, up to a stop text or end-of-text token."""
        arguments: list[Any] = [request.args for request in requests]
        by_settings: dict[str, list[int]] = {}
        for number, (_, settings) in enumerate(arguments):
            by_settings.setdefault(repr(settings), []).append(number)
        texts = dict[int, str]()
        for numbers in by_settings.values():
            contexts = {number: arguments[number][0] for number in numbers}
            settings = parse_generation(arguments[numbers[0]][1])
            texts |= self._generate(contexts, settings)
        return [texts[number] for number in range(len(requests))]

    def _generate(
        self, contexts: dict[int, str], settings: "Generation"
    ) -> Iterator[tuple[int, str]]:
        """Yield each context's number and its continuation."""
        max_prompt = self.max_length - settings.num_tokens
        prompts = {
            number: self.tok_encode(context)[-max_prompt:] or [self.prefix_token_id]
            for number, context in contexts.items()
        }
        numbers = sorted(prompts, key=lambda number: -len(prompts[number]))
        for start in range(0, len(numbers), self._num_rows):
            chunk = numbers[start : start + self._num_rows]
            rows = [prompts[number] for number in chunk]
            # All batches have the same number of rows, so that one program suffices.
            rows += [rows[-1]] * (self._num_rows - len(rows))
            texts = continue_rows(
                self._program,
                self.params,
                self._encoding,
                rows,
                num_tokens=settings.num_tokens,
                sampling=settings.sampling,
                seed=start,
                stop=[*settings.stop, END_OF_TEXT],
            )
            yield from zip(chunk, texts, strict=False)
            self.heartbeat()


class Generation(NamedTuple):
    """The settings with which a task generates texts."""

    num_tokens: int
    stop: list[str]
    sampling: Sampling
    unknown: list[str]  # further settings, which are not supported


def parse_generation(arguments: dict[str, Any]) -> Generation:
    """Read a task's `generation_kwargs`."""
    settings: dict[str, Any] = {**normalize_gen_kwargs(arguments)}
    num_tokens = settings.pop("max_gen_toks")
    stop = settings.pop("until", None) or []
    default = 1.0 if settings.pop("do_sample") else 0.0
    sampling = Sampling(
        settings.pop("temperature", default),
        top_k=settings.pop("top_k", None),
        top_p=settings.pop("top_p", None),
    )
    stop = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    return Generation(num_tokens, stop, sampling, unknown=sorted(settings))


def split_into_windows(
    number: int, context: list[int], tokens: list[int], longest: int
) -> Iterator[ScoredWindow]:
    """Divide a request's tokens into windows with the longest prefixes that fit."""
    all_tokens = [*context, *tokens]
    for start in range(len(context), len(all_tokens), longest):
        stop = min(start + longest, len(all_tokens))
        prefix = all_tokens[max(0, stop - longest - 1) : start]
        yield ScoredWindow(number, prefix, all_tokens[start:stop])


def row_lengths(longest: int, program: Program) -> list[int]:
    """Return the lengths to which rows are padded: `longest`, its half, and so on.

    The halves are multiples of `_BLOCK`, also on each device that shares a row.
    """
    shards = program.batch_shards.sequence
    multiple = _BLOCK * (2 * shards if shards > 1 else 1)
    lengths = [longest]
    while lengths[-1] % (2 * multiple) == 0:
        lengths.append(lengths[-1] // 2)
    return lengths
