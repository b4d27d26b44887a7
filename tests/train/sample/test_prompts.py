"""Many prompts at once are what each is alone, and end where they shall."""

from dataclasses import replace

import pytest
from flax import nnx

from model.choices import Position
from model.gpt import GPT, params_of
from train.errors import ConfigError
from train.sample.generate import Sampling, _draw, _read, generate
from train.sample.prompts import continue_prompts, text_before

GREEDY = Sampling(temperature=0)
PROMPTS = ["def f(x):", "", "import os\n" * 8, "class"]


@pytest.fixture(scope="module")
def given(programs, store):
    program = programs("model.num_layers=1", devices=1)
    return program, params_of(GPT(program.config.model, nnx.Rngs(3))), store


@pytest.fixture(scope="module")
def together(given):
    return continue_prompts(*given, PROMPTS, 8, GREEDY)


def test_prompts_of_all_lengths_in_one_batch_are_what_each_is_alone(given, together):
    alone = [continue_prompts(*given, [PROMPTS[i]], 8, GREEDY)[0] for i in (0, 2)]
    assert [together[0], together[2]] == alone
    assert len({*together}) == 4


def test_a_text_ends_before_the_first_stop(given, together):
    ends = [together[0][5], together[0][3]]
    (text,) = continue_prompts(*given, PROMPTS[:1], 8, GREEDY, stop=ends)
    assert text == together[0][: min(map(together[0].index, ends))]


def test_no_more_is_drawn_once_all_have_ended(given, monkeypatch):
    drawn = []

    def counted(*positional, **named):
        for each in generate(*positional, **named):
            drawn.append(each.shape)
            yield each

    monkeypatch.setattr("train.sample.prompts.generate", counted)
    whole = continue_prompts(*given, PROMPTS[:2], 70, GREEDY)
    assert drawn == [(2, 32), (2, 32), (2, 6)]
    drawn.clear()
    ends = [text[3] for text in whole]
    assert continue_prompts(*given, PROMPTS[:2], 70, GREEDY, stop=ends) == [
        text_before(text, ends) for text in whole
    ]
    assert drawn == [(2, 32)]


def test_prompts_of_other_lengths_need_no_other_program(given):
    seen = set()
    for prompts in (["a" * 60] * 4, ["abc"] * 4, ["abc", "", "abcd" * 16, "a" * 33]):
        continue_prompts(*given, prompts, 20, GREEDY)
        seen.add((_read._cache_size(), _draw._cache_size()))
    assert len(seen) == 1


def test_learned_positions_bound_prompt_and_tokens(given):
    program, *rest = given
    model = replace(
        program.config.model, position=Position.learned, max_sequence_length=16
    )
    program = replace(program, config=replace(program.config, model=model))
    with pytest.raises(ConfigError, match="must be at most 7"):
        continue_prompts(program, *rest, ["def f(x):"], 8)
