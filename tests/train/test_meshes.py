"""A run on a mesh equals one on one device: gradients, losses, loads, weights.

The runs use float32 and packed documents, and no weight has zero gradients.

Each processor rounds in its own way, and rounding errors grow from step to step. A
token with almost equal scores of two experts may then go to either, which changes a
loss by more than rounding does. Models with experts therefore take few steps, on
batches without such a token.
"""

import functools

import jax
import numpy as np
import pytest

from tests.train.conftest import take_steps
from train.config import CheckpointConfig
from train.prove.divided_step import DividedStep
from train.prove.parity import Reference
from train.run.checkpoint import Checkpoints

DENSE = (
    *("model.num_layers=4", "model.num_kv_heads=2", "model.embed_dim=16"),
    "optimizer.learning_rate=0.003",
)
LOCAL = (
    *("model.layer_pattern=[local,global]", "model.attention_soft_cap=2"),
    "model.attention_sinks=true",
)
MOE = (
    *("model=moe_nano", "model.num_layers=4", "model.dense_layers=0"),
    *("model.num_heads=4", "model.num_kv_heads=2", "model.embed_dim=32"),
    *("model.expert_dim=24", "model.init=scaled", "model.layer_unroll=1"),
    "optimizer.learning_rate=0.01",
)
BALANCED = ("model.router_aux_weight=0.1", "model.router_z_weight=0.01")
MODELS = {
    "dense": DENSE,
    "near": (  # The window reaches at most a chunk of a ring of four.
        *(*DENSE, *LOCAL, "model.window=5", "model.token_shift=both"),
    ),
    "far": (*DENSE, *LOCAL, "model.window=11"),  # longer than a chunk of a ring of two
    "experts": MOE,
    "every": (*MOE, "model.num_layers=6", "model.experts_every=3"),
    "mixed": (
        *(*MOE, "model.num_layers=8", "model.dense_layers=2", "model.mlp_dim=24"),
        *("model.window=5", "model.layer_pattern=[local,local,global]"),
    ),
    "ahead": (
        *(*MOE, "model.num_layers=2", "model.predict_ahead=2"),
        *("model.router_bias_rate=0.01", "model.token_shift=mlp"),
    ),
    "latent": (
        *("model.num_layers=4", "model.embed_dim=16", "model.mixer=latent_attention"),
        *("model.query_rank=16", "model.kv_rank=8", "model.nope_head_dim=6"),
        *("model.rope_head_dim=4", "model.value_head_dim=7", "model.qk_norm=false"),
        "model.rotary_fraction=1",
    ),
    "delta": (
        *(*MOE, "model.mixer_pattern=[gated_delta,attention]"),
        *("model.attention_gate=true", "model.delta_value_heads=8"),
        "model.delta_key_dim=16",
    ),
    "balanced": (*MOE, *BALANCED),  # losses per microbatch: no stages
    "grouped": (
        *(*MOE, "model.router_groups=4", "model.router_groups_kept=2"),
        *("model.routed_scaling=2", "model.shared_expert_gate=true"),
        "model.router_sequence_aux_weight=0.1",
    ),
}
FAST = [
    ("near", "fsdp=2 context=2 tensor=2"),
    ("dense", "pipeline=2 fsdp=2 tensor=2 pipeline_repeats=2"),
    ("balanced", "data=2 expert=2 tensor=2"),
]
DEEP_PIPELINE = "pipeline=2 pipeline_repeats=2 train.pipeline_microbatches=4"
SLOW = [
    ("dense", "data=2 fsdp=2 tensor=2 train.remat=full train.loss_chunk_tokens=8"),
    ("dense", "fsdp=4 tensor=2"),
    ("far", "data=2 fsdp=2 tensor=2 train.accumulation_steps=2"),
    ("near", "fsdp=2 context=4 train.remat=full"),
    ("near", "fsdp=4 context=2 context_attention=ulysses"),
    ("near", "context=4 tensor=2 context_attention=all_gather"),
    ("balanced", "fsdp=2 context=2 expert=2"),
    ("grouped", "data=2 expert=2 tensor=2"),
    ("grouped", "context=2 expert=2 fsdp=2"),
    ("grouped", "pipeline=2 fsdp=2 context=2 train.accumulation_steps=2"),
    ("latent", "context=4 tensor=2 context_attention=ring"),
    ("latent", "fsdp=2 context=4 context_attention=ring train.remat=full"),
    ("latent", "fsdp=2 context=2 tensor=2 context_attention=all_gather"),
    ("latent", "fsdp=4 context=2 context_attention=ulysses train.remat=[latent]"),
    ("latent", "pipeline=2 fsdp=2 tensor=2 train.remat=full"),
    ("delta", "data=2 fsdp=2 tensor=2"),
    ("delta", "context=4 fsdp=2 train.remat=full"),  # two pieces per device
    (
        "delta",
        "context=4 tensor=2 context_attention=all_gather",
    ),  # one piece per device
    ("delta", "pipeline=2 context=2 expert=2"),
    ("dense", "pipeline=4 data=2"),
    ("near", "pipeline=2 data=2 tensor=2"),
    ("near", "pipeline=2 fsdp=2 context=2 train.remat=dots"),
    ("far", "pipeline=2 context=4"),
    ("dense", f"{DEEP_PIPELINE} context=2 tensor=2"),
    ("dense", "pipeline=2 fsdp=2 tensor=2 train.accumulation_steps=2"),
    ("experts", "pipeline=2 data=2 expert=2 pipeline_repeats=2"),
    ("experts", "pipeline=2 expert=2 tensor=2 train.remat=full"),
    ("experts", "pipeline=2 context=2 expert=2"),
    ("every", "fsdp=2 expert=2 tensor=2 train.remat=full"),
    ("every", "pipeline=2 fsdp=2 expert=2"),
    ("mixed", "pipeline=2 data=2 expert=2"),
    ("ahead", "fsdp=2 context=2 expert=2"),
    ("ahead", "context=4 tensor=2"),
    ("ahead", "pipeline=2 data=2 expert=2"),
]


@pytest.fixture(scope="module")
def alone(configure):
    """Return the steps of a model on one device."""

    @functools.cache
    def alone(model):
        config = configure(MODELS[model])
        steps = num_steps(config)
        step = DividedStep(config)
        reference = Reference(step, jax.devices(), num_steps=steps)
        # Delta nets amplify rounding errors: ten tries find no stable batches.
        assert reference.is_stable or model == "delta"
        assert (reference.batches[0].segment_ids.max(axis=1) > 1).any()
        assert all(name.endswith("router.balance") for name in reference.no_gradient)
        _, values = reference.values
        losses = [x for key, x in values.items() if key.quantity == "loss"]
        assert losses[-1] < losses[0] - 0.1  # it learns
        return reference

    return alone


@pytest.mark.parametrize(
    ("model", "mesh"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_run_equals_that_of_one_device(configure, alone, model, mesh):
    config = configure([*MODELS[model], *sizes(mesh)])
    comparison = alone(model).compare(DividedStep(config))
    losses = [d for d in comparison.differences if d.key.quantity == "loss"]
    assert len(losses) == 1 + config.model.predict_ahead + num_steps(config)
    assert not comparison.failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "others"),
    [
        ("experts", "data=2 expert=4", ["fsdp=8", "data=2 context=2 tensor=2"]),
        ("dense", "pipeline=2 fsdp=2 tensor=2 pipeline_repeats=2", ["fsdp=8"]),
    ],
)
def test_a_resumed_run_is_bitwise_equal_and_close_on_other_meshes(
    programs, store, tmp_path, model, mesh, others
):
    overrides = (*MODELS[model], "optimizer.ema_decay=0.9")
    program = programs([*overrides, *sizes(mesh)], devices=8)
    state, _ = take_steps(program, store, program.init(), 3)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(3, state, {"step": 3})
    checkpoints.wait()
    final_state, metrics = take_steps(program, store, state, 3)
    restored_state = checkpoints.saved.restore(program.state)
    resumed_state, resumed_metrics = take_steps(program, store, restored_state, 3)
    assert [metric["loss"] for metric in resumed_metrics] == [
        metric["loss"] for metric in metrics
    ]
    jax.tree.map(
        np.testing.assert_array_equal, *jax.device_get((resumed_state, final_state))
    )
    for other_mesh in others:
        other_program = programs([*overrides, *sizes(other_mesh)], devices=8)
        other_state = checkpoints.saved.restore(other_program.state)
        assert (
            jax.tree.map(lambda leaf: leaf.sharding, other_state)
            == other_program.shardings
        )
        # Later steps round more, which may choose another expert.
        count = 1 if program.config.model.expert_layers else 3
        _, resumed_metrics = take_steps(other_program, store, other_state, count)
        for metric, expected in zip(resumed_metrics, metrics, strict=False):
            np.testing.assert_allclose(metric["loss"], expected["loss"], rtol=1e-5)
    checkpoints.close()


def num_steps(config) -> int:
    return 6 if config.model.expert_layers else 20


def sizes(mesh: str) -> list[str]:
    """Return overrides: words without a dot are sizes of the mesh."""
    return [word if "." in word else f"mesh.{word}" for word in mesh.split()]
