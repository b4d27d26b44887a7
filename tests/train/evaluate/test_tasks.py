"""Tasks of lm-evaluation-harness score a model."""

import os
import socket
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data.encoding import FolderEncoding, encode
from data.tokenizer import load_tokenizer
from model.catalog import MODEL_PARTS
from model.gpt import GPT, bind, params_of
from model.placement import ONE_DEVICE
from tests.train.evaluate.task_files import NAMES, write_tasks
from tests.train.pretrained.conftest import perturbed
from train.config import EvalSet, RunConfig
from train.errors import ConfigError
from train.evaluate import tasks as tasks_module
from train.evaluate.__main__ import EvaluateConfig, evaluate_mistakes
from train.evaluate.tasks import TaskRequest, Tasks, load_tasks, task_metrics

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from train.evaluate.harness import HarnessModel, parse_generation, split_into_windows

BYTES = load_tokenizer("bytes")
SMALL = ("model.num_layers=1", "data.sequence_length=64")
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
REQUESTS = [
    (context, text)
    for context in ("def f(x):", "import os;" * 12, "a")
    for text in (" return x", "\n" * 70, " b")
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return TaskRequest(NAMES, write_tasks(tmp_path_factory.mktemp("tasks")), None, None)


@pytest.fixture(scope="module")
def params(programs):
    return perturbed(programs(SMALL, devices=1).config.model, seed=4)


def scores_of(program, params, requests):
    model = HarnessModel(program, BYTES)
    model.params = jax.device_put(params, program.shardings.params)
    encoded = [(None, *model._encode_pair(*request)) for request in requests]
    return model._loglikelihood_tokens(encoded)


@pytest.fixture(scope="module")
def together(programs, params):
    return scores_of(programs(SMALL, devices=1), params, REQUESTS)


def score_alone(
    program,
    params,
    context: str,
    text: str,
    first: tuple[int, ...] = (),
    num_tokens: int = BYTES.n_vocab,
) -> tuple[float, bool]:
    """Score a text after its context in windows, which hold all earlier tokens that
    fit.

    `first` are the tokens before the context, and `num_tokens` is the tokenizer's size.
    """
    model = bind(program.model, params)
    execution = program.execution._replace(placement=ONE_DEVICE)
    previous, tokens = (
        encode(BYTES, part.encode()).tolist() for part in (context, text)
    )
    previous = [*first, *previous]
    all_tokens = [*previous, *tokens]
    T = program.config.data.sequence_length

    @jax.jit
    def log_probabilities(row):
        x, *_ = model.features(row[None], jnp.arange(T)[None], None, execution)
        logits = model.logits(x, execution)[0, :, :num_tokens]
        return jax.nn.log_softmax(logits)

    nats = 0.0
    greedy = True
    for start in range(len(previous), len(all_tokens), T):
        stop = min(start + T, len(all_tokens))
        window = all_tokens[max(0, stop - T - 1) : stop]
        row = np.zeros(T, np.int32)
        row[: len(window) - 1] = window[:-1]
        scores = np.asarray(log_probabilities(row))[: len(window) - 1]
        for index, token in enumerate(window[1:]):
            if index >= len(window) - 1 - (stop - start):
                nats += scores[index, token]
                greedy &= scores[index].argmax() == token
    return nats, bool(greedy)


@pytest.mark.slow
def test_requests_of_one_batch_score_as_each_does_alone(programs, params, together):
    program = programs(SMALL, devices=1)
    for request, score in list(zip(REQUESTS, together, strict=True))[::2]:
        nats, greedy = score_alone(program, params, *request)
        assert score == (pytest.approx(nats, rel=1e-5), greedy)


def imported_encoding(bos_token: int | None) -> FolderEncoding:
    return FolderEncoding(
        "imported",
        pat_str=r"(?s:.+)",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": 256, "<s>": 257},
        bos_token=bos_token,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["true", "false"])
@pytest.mark.parametrize(
    ("encoding", "begin", "before_prompts"),
    [
        (BYTES, 256, False),
        (imported_encoding(257), 257, True),
        (imported_encoding(None), 256, False),
    ],
    ids=["bytes", "adds", "plain"],
)
def test_texts_begin_as_documents_do_in_training(
    programs, params, rule, encoding, begin, before_prompts
):
    """A BOS begins them if an imported tokenizer adds one, and otherwise
    end-of-text."""
    program = programs([*SMALL, f"data.document_start={rule}"], devices=1)
    model = HarnessModel(program, encoding)
    model.params = jax.device_put(params, program.shardings.params)
    first = (begin,) if before_prompts else ()
    if rule == "false":
        begin = 256
        first = ()
    requests = [("", " b"), ("def f(x):", " return x"), ("a" * 70, " b")]
    results = model.loglikelihood(instances(requests, "loglikelihood"))
    texts = ["def f(x):", "x" * 100]
    rolled = model.loglikelihood_rolling(
        instances([(text,) for text in texts], "loglikelihood_rolling")
    )
    score = partial(score_alone, program, params, num_tokens=encoding.n_vocab)
    for (context, text), (nats, _) in zip(requests, results, strict=True):
        prefix = first if context else (begin,)
        expected, _ = score(context, text, first=prefix)
        assert nats == pytest.approx(expected, rel=1e-5)
    for text, nats in zip(texts, rolled, strict=True):
        expected, _ = score("", text, first=(begin,))
        assert nats == pytest.approx(expected, rel=1e-5)


def instances(requests, kind) -> list[Instance]:
    return [Instance(kind, {}, request, 0) for request in requests]


def test_the_likeliest_tokens_are_greedy(programs, params):
    program = programs(SMALL, devices=1)
    model = HarnessModel(program, BYTES)
    context = encode(BYTES, b"def f(x):").tolist()
    model.params = jax.device_put(params, program.shardings.params)
    requests = [(None, context, [token]) for token in range(BYTES.n_vocab)]
    scores = model._loglikelihood_tokens(requests)
    model.params = jax.tree.map(jnp.zeros_like, model.params)
    uniform_scores = model._loglikelihood_tokens(requests[:8])
    assert [greedy for _, greedy in uniform_scores] == [True] + [False] * 7  # a tie
    best = max(range(BYTES.n_vocab), key=lambda token: scores[token][0])
    assert [i for i, (_, greedy) in enumerate(scores) if greedy] == [best]
    # The padding of the vocabulary has no probability.
    assert sum(np.exp(score) for score, _ in scores) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "devices", "rows"), [(MESH, 8, 8), (["train.accumulation_steps=4"], 1, 2)]
)
def test_a_mesh_or_smaller_batches_change_no_score(
    programs, params, together, more, devices, rows
):
    """No more rows are scored at once than a microbatch has."""
    program = programs([*SMALL, *more], devices=devices)
    assert HarnessModel(program, BYTES)._num_rows == rows
    scores = scores_of(program, params, REQUESTS)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in together]
    assert [s for s, _ in scores] == pytest.approx([s for s, _ in together], rel=1e-5)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
def test_whole_texts_are_cut_as_the_harness_cuts_them(count):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokens = list(range(1, count + 1))
    theirs = [*map(make_disjoint_window, get_rolling_token_windows(tokens, 0, 8, 1))]
    ours = [
        (context, part) for _, context, part in split_into_windows(0, [0], tokens, 8)
    ]
    assert ours == theirs


def test_all_kinds_of_tasks_give_numbers_with_errors(programs, params, asked, capfd):
    program = programs([*SMALL, *MESH], devices=8)
    asked = asked._replace(num_fewshot=1)
    tasks = Tasks(load_tasks(asked), asked, program, BYTES)
    beats = []
    placed = jax.device_put(params, program.shardings.params)
    metrics = tasks.score(placed, lambda: beats.append(1))
    assert tasks.score(placed) == metrics
    assert "Tokenizing" not in capfd.readouterr().err  # no progress bar
    assert {f"tasks/toy_choices/{m}" for m in ("acc", "acc_norm")} < {*metrics}
    assert metrics["tasks/toy_choices/acc_stderr"] > 0
    assert metrics["tasks/toy_texts/bits_per_byte"] > 1
    assert metrics["tasks/toy_answers/exact_match"] == 0
    assert len(beats) > 5
    fewer = Tasks(load_tasks(asked), asked._replace(limit=3), program, BYTES)
    assert fewer.fingerprint != tasks.fingerprint
    repeated = Tasks(load_tasks(asked), asked, program, BYTES)
    assert repeated.fingerprint == tasks.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ((), ("mesh.context=2", "mesh.fsdp=4")),
        ((), ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.data=2")),
        (("model.mlp=moe",), ("mesh.expert=2", "mesh.fsdp=2", "mesh.tensor=2")),
    ],
)
def test_any_mesh_gives_the_same_answers(programs, asked, model, mesh):
    scores = []
    for layout in ((), mesh):
        overrides = ("model.num_layers=2", "data.sequence_length=64", *model, *layout)
        program = programs(overrides, devices=8 if layout else 1)
        initial_params = params_of(GPT(program.config.model, nnx.Rngs(0), MODEL_PARTS))
        tasks = Tasks(load_tasks(asked), asked, program, BYTES)
        scores.append(
            tasks.score(jax.device_put(initial_params, program.shardings.params))
        )
    assert scores[1] == pytest.approx(scores[0], rel=1e-4)


def rule_of(*fields, key: str = "tasks") -> str:
    with pytest.raises(ConfigError) as error:
        load_tasks(TaskRequest(*fields, key))
    (mistake,) = error.value.mistakes
    assert mistake.key == key
    return mistake.rule


def test_what_tasks_lack_is_reported_when_they_are_loaded(
    asked, tmp_path, monkeypatch, programs
):
    manager = partial(TaskManager, include_defaults=False)  # listing all takes seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    unknown = ["toy_choises"], asked.path, None, None
    assert f"of the folder task_path={asked.path}" in rule_of(*unknown)
    assert "folder eval.task_path=" in rule_of(*unknown, key="eval.tasks")
    lost = write_tasks(tmp_path / "lost", json="EleutherAI/nowhere")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert "Without a network" in rule_of(["toy_texts"], lost, None, None)
    monkeypatch.setattr(tasks_module, "find_spec", lambda name: None)
    assert ".[eval]" in rule_of(NAMES, asked.path, None, None)
    monkeypatch.undo()
    long = write_tasks(tmp_path / "long", **{"max_gen_toks: 12": "max_gen_toks: 64"})
    request = TaskRequest(NAMES, long, None, None)
    with pytest.raises(ConfigError, match="64 tokens, but must leave room"):
        Tasks(load_tasks(request), request, programs(SMALL, devices=1), BYTES)


def test_an_unreachable_hub_is_not_asked_again(asked, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with socket.socket() as hub:
        hub.bind(("localhost", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"https://localhost:{hub.getsockname()[1]}")
        hub.listen()
        load_tasks(asked)
        assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    load_tasks(asked)  # a proxy may reach the hub
    assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.delenv("https_proxy")
    load_tasks(asked)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_the_number_of_examples_shown_is_the_tasks_or_the_requested(asked):
    def shown(num_fewshot):
        loaded = load_tasks(asked._replace(num_fewshot=num_fewshot))
        return {task.config.num_fewshot for task in loaded["tasks"].values()}

    assert shown(None) == {0}
    assert shown(2) == {2}


def test_keys_that_exclude_each_other_are_refused():
    run = RunConfig(name="x")
    sets = {"web": EvalSet("web")}
    (alone,) = evaluate_mistakes(EvaluateConfig(run, limit=3))
    mistakes = evaluate_mistakes(
        EvaluateConfig(run, tasks=["piqa"], sets=sets, num_batches=2)
    )
    assert [alone.key, *(mistake.key for mistake in mistakes)] == [
        "limit",
        "sets",
        "num_batches",
    ]
    fits = EvaluateConfig(run, tasks=["piqa"], limit=3, batch_size=4)
    assert evaluate_mistakes(fits) == []


def test_sampling_is_read_as_the_harness_means_it():
    greedy = parse_generation({"until": "\n", "max_gen_toks": 3, "temperature": 0.5})
    assert greedy.sampling.temperature == 0.5
    assert greedy.stop == ["\n"]
    settings = parse_generation({"do_sample": False, "temperature": 1})
    assert settings.sampling.temperature == 0
    assert parse_generation({"num_beams": 2}).unknown == ["num_beams"]


def test_parts_of_a_group_are_left_out():
    results = {
        "groups": {"all": {}},
        "group_subtasks": {"all": ["one"], "loose": ["two"]},
        "results": {
            "all": {"alias": "all", "acc,none": 0.5, "acc_stderr,none": "N/A"},
            "one": {"acc,none": 1.0},
            "two": {"exact_match,strict-match": 0.25, "sample_len": 3},
        },
    }
    assert task_metrics(results) == {
        "tasks/all/acc": 0.5,
        "tasks/two/exact_match/strict-match": 0.25,
    }
