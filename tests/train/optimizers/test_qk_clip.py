"""QK-clip equals the paper's algorithm, written out head by head."""

import math

import jax
import numpy as np
import pytest

from data.batches import Order
from tests.model import reference
from tests.train.conftest import CUBE
from train.cli.rules import config_mistakes
from train.core.feed import place

THRESHOLD = 13.0  # The scores of `make_state` lie on both sides.
MUON = ("optimizer=muon", "data.document_mask=false")
# Two query heads share a key head, and have gates; queries and keys have biases.
GROUPED = ("model=llama_nano", "model.qkv_bias=true", "model.attention_gate=true")
LATENT = ("model=deepseek_v3_nano", "model.mlp=dense", "model.rope_scaling.kind=none")
LATENT += ("model.router_sequence_aux_weight=0",)
CLIP = f"optimizer.qk_clip={THRESHOLD:g}"
NO_UPDATE = "optimizer.groups=[{match: '*', learning_rate: 0, weight_decay: 0}]"


@pytest.fixture
def scores_of(monkeypatch):
    """Return the masked scores [layer][B, N, T, S] of a model, from its reference."""
    recorded = []
    original = reference.attend

    def attend(q, k, v, mask, *, scale=None, **options):
        repeated = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = np.einsum("btnh,bsnh->bnts", q, repeated, dtype=np.float64)
        scores *= scale or q.shape[-1] ** -0.5
        recorded.append(np.where(mask, scores, -np.inf))
        return original(q, k, v, mask, scale=scale, **options)

    monkeypatch.setattr(reference, "attend", attend)

    def scores_of(params, config, inputs):
        recorded.clear()
        reference.reference_loss(params, config, np.pad(inputs, ((0, 0), (0, 1))))
        return list(recorded)

    return scores_of


def bounds_of(scores) -> np.ndarray:
    """Return for each layer and head the largest log-sum-exp of a query's scores."""
    return np.stack([np.log(np.exp(s).sum(-1)).max(axis=(0, 2)) for s in scores])


def clipped_by_paper(params, bounds, config):
    """Return weights that are clipped head by head."""
    params = jax.tree.map(lambda x: np.array(x, np.float64), params)
    for layer, heads in enumerate(bounds):
        # The weights in `part` are views.
        part = reference.layer_of(params, config, layer)["attention"]
        gammas = [THRESHOLD / s if s > THRESHOLD else 1.0 for s in heads]
        for head, gamma in enumerate(gammas):
            if "key_value_up" in part:
                P = config.nope_head_dim
                root = math.sqrt(gamma)
                part["query_up"]["weight"][:, head, :P] *= root
                part["query_up"]["weight"][:, head, P:] *= gamma
                part["key_value_up"]["weight"][:, head, :P] *= root
                continue
            H = config.head_size
            size = len(gammas) // config.kv_heads
            group = head // size
            smallest = min(gammas[group * size : (group + 1) * size])
            for array in part["query"].values():
                array[..., head, :H] *= gamma / math.sqrt(smallest)
            if head % size == 0:
                for array in part["key"].values():
                    array[..., group, :] *= math.sqrt(smallest)
    return params


def make_state(program, store, factor: float):
    """Return a state whose queries and keys are large, and a batch."""
    state = jax.device_get(program.init())
    rng = np.random.default_rng(0)

    def enlarge(path, x):
        if path[-2].key not in ("query", "key", "query_up", "key_value_up"):
            return x
        return factor * x + 0.1 * rng.normal(size=x.shape).astype(x.dtype)

    params = jax.tree_util.tree_map_with_path(enlarge, state.params)
    batch = Order(store, program.config.data, 0).read(0)
    return state._replace(params=params), batch


def step(program, state, batch):
    state = jax.device_put(state, program.shardings)
    state, metrics = program.train_step(state, place(batch, program.batch))
    return jax.device_get((state.params, metrics))


def assert_near(actual, expected, tolerance=1e-6):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error <= tolerance, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize(
    ("model", "factor"),
    [pytest.param(GROUPED, 1.7, marks=pytest.mark.slow), (LATENT, 2.0)],
)
def test_an_update_is_the_papers(programs, store, scores_of, model, factor):
    plain = programs([*MUON, *model], devices=1)
    config = plain.config.model
    state, batch = make_state(plain, store, factor)
    bounds = bounds_of(scores_of(state.params, config, batch.inputs))
    assert 0 < (bounds > THRESHOLD).sum() < bounds.size
    unclipped, _ = step(plain, state, batch)
    params, metrics = step(programs([*MUON, *model, CLIP], devices=1), state, batch)
    np.testing.assert_allclose(metrics["max_score"], bounds.max(axis=1), rtol=1e-5)
    assert_near(params, clipped_by_paper(unclipped, bounds, config))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "factor"), [(GROUPED, 1.7), slow(LATENT, 2.0)])
@pytest.mark.parametrize(
    "mesh",
    [
        CUBE,
        slow((*CUBE, "train.accumulation_steps=2", "train.remat=full")),
        slow(("mesh.pipeline=2", "mesh.context=2", "mesh=auto")),
        slow(("mesh=auto", "mesh.context=2", "mesh.context_attention=ulysses")),
        slow(("mesh=auto", "mesh.context=2", "mesh.context_attention=all_gather")),
    ],
    ids=" ".join,
)
def test_eight_devices_clip_like_one(programs, store, scores_of, mesh, model, factor):
    plain = programs([*MUON, *model, *mesh], devices=8)
    clipping = programs([*MUON, *model, *mesh, CLIP], devices=8)
    state, batch = make_state(plain, store, factor)
    bounds = bounds_of(scores_of(state.params, plain.config.model, batch.inputs))
    unclipped, _ = step(plain, state, batch)
    params, _ = step(clipping, state, batch)
    assert_near(params, clipped_by_paper(unclipped, bounds, plain.config.model))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "factor"), [(GROUPED, 1.7), (LATENT, 2.0)])
def test_no_score_of_the_batch_stays_above_the_threshold(
    programs, store, scores_of, model, factor
):
    """The update is zero, so that only clipping changes weights."""
    clipping = programs(
        [*MUON, *model, CLIP, NO_UPDATE, "model.num_layers=1"], devices=1
    )
    state, batch = make_state(clipping, store, factor)
    params, _ = step(clipping, state, batch)
    config = clipping.config.model
    (scores,) = scores_of(state.params, config, batch.inputs)
    (clipped,) = scores_of(params, config, batch.inputs)
    old_maxima, new_maxima = (x.max(axis=(0, 2, 3)) for x in (scores, clipped))
    assert (new_maxima <= THRESHOLD * (1 + 1e-6)).all()
    bounds = bounds_of([scores])[0]
    exceeds = bounds > THRESHOLD
    assert 0 < exceeds.sum() < exceeds.size
    np.testing.assert_allclose(new_maxima[~exceeds], old_maxima[~exceeds], rtol=1e-5)
    gammas = THRESHOLD / bounds[exceeds]
    np.testing.assert_allclose(
        new_maxima[exceeds], gammas * old_maxima[exceeds], rtol=1e-5
    )


def test_a_skipped_step_clips_nothing(programs, store):
    clipping = programs([*MUON, *GROUPED, CLIP], devices=1)
    state, batch = make_state(clipping, store, 1.7)
    state.params["embedding"]["weight"] = np.full((384, 32), np.nan, np.float32)
    params, metrics = step(clipping, state, batch)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def test_clipping_does_not_change_the_format_of_the_state(programs):
    plain, clipping = (programs([*MUON, *GROUPED, *m]) for m in ((), (CLIP,)))
    assert plain.state == clipping.state


@pytest.mark.slow
def test_layers_without_attention_are_left_out(programs, store):
    mixers = "model.mixer_pattern=[gated_delta, attention]"
    clipping = programs([*MUON, "model=llama_nano", mixers, CLIP], devices=1)
    state, batch = make_state(clipping, store, 1.7)
    _, metrics = step(clipping, state, batch)
    assert metrics["max_score"][0] == 0
    assert metrics["max_score"][1] > 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.qk_norm", "true"),
        ("model.attention_soft_cap", "50"),
        ("model.attention_sinks", "true"),
        ("model.predict_ahead", "1"),
        ("model.mixer", "gated_delta"),
        ("optimizer.offload", "true"),
        ("data.sequence_length", "1000000"),
    ],
)
def test_settings_that_exclude_qk_clip_are_refused(configure, key, value):
    base = ("model=llama_nano", CLIP)
    assert config_mistakes(configure(base)) == []
    (mistake,) = config_mistakes(configure([*base, f"{key}={value}"]))
    assert mistake.key == "optimizer.qk_clip"
    assert key in mistake.rule
    assert config_mistakes(configure([*base[:1], f"{key}={value}"])) == []
