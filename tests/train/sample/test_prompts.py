"""Prompts of one batch continue as each does alone, and end where they must."""

from dataclasses import replace

import pytest
from flax import nnx

from data.beginning import beginning_of
from model.catalog import MODEL_PARTS
from model.choices import Position
from model.gpt import GPT, params_of
from train.errors import ConfigError
from train.sample import prompts as prompts_module
from train.sample.generate import Sampling, _draw, generate, prefill
from train.sample.prompts import continue_rows, prompt_rows, text_before

GREEDY = Sampling(temperature=0)
PROMPTS = ["def f(x):", "", "import os\n" * 8, "class"]


@pytest.fixture(scope="module")
def program(programs):
    return programs(["model.num_layers=1"], devices=1)


@pytest.fixture(scope="module")
def continued(program, store):
    """Return a function that continues prompts greedily with drawn parameters."""
    params = params_of(GPT(program.config.model, nnx.Rngs(3), MODEL_PARTS))
    encoding = store.encoding

    def continued(prompts, num_tokens=8, program=program, stop=()):
        beginning = beginning_of(program.config.data, encoding)
        rows = prompt_rows(encoding, prompts, beginning)
        arguments = (program, params, encoding, rows, num_tokens, GREEDY)
        return continue_rows(*arguments, stop=stop)

    return continued


@pytest.fixture(scope="module")
def together(continued):
    return continued(PROMPTS)


def test_prompts_of_all_lengths_in_one_batch_continue_as_alone(continued, together):
    alone = [continued([PROMPTS[i]])[0] for i in (0, 2)]
    assert [together[0], together[2]] == alone
    assert len({*together}) == 4


def test_a_text_ends_before_the_first_stop(continued, together):
    ends = [together[0][5], together[0][3]]
    (text,) = continued(PROMPTS[:1], stop=ends)
    assert text == together[0][: min(map(together[0].index, ends))]


def test_a_text_ends_with_its_document_if_documents_have_beginnings(continued, program):
    """The model has then never learned what follows end-of-text."""
    data = replace(program.config.data, document_start=True)
    changed_program = replace(program, config=replace(program.config, data=data))
    full_texts = continued(PROMPTS, 70)
    assert any("<|endoftext|>" in text for text in full_texts)
    expected = [text_before(text, ["<|endoftext|>"]) for text in full_texts]
    assert continued(PROMPTS, 70, program=changed_program) == expected


def test_no_more_is_drawn_once_all_have_ended(continued, monkeypatch):
    drawn = []

    def count_draws(*positional, **named):
        for part in generate(*positional, **named):
            drawn.append(part.shape)
            yield part

    monkeypatch.setattr(prompts_module, "generate", count_draws)
    full_texts = continued(PROMPTS[:2], 70)
    assert drawn == [(2, 32), (2, 32), (2, 6)]
    drawn.clear()
    ends = [text[3] for text in full_texts]
    texts = continued(PROMPTS[:2], 70, stop=ends)
    assert texts == [text_before(text, ends) for text in full_texts]
    assert drawn == [(2, 32)]


def test_prompts_of_other_lengths_compile_no_other_program(continued):
    cache_sizes = set()
    for prompts in (["a" * 60] * 4, ["abc"] * 4, ["abc", "", "abcd" * 16, "a" * 33]):
        continued(prompts, 20)
        cache_sizes.add((prefill._cache_size(), _draw._cache_size()))
    assert len(cache_sizes) == 1


def test_learned_positions_bound_prompt_and_tokens(continued, program):
    learned = {"position": Position.learned, "max_sequence_length": 16}
    config = program.config
    config = replace(config, model=replace(config.model, **learned))
    with pytest.raises(ConfigError, match="must be at most 7"):
        continued(["def f(x):"], program=replace(program, config=config))
