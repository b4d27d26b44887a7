"""Estimated collectives follow compiled steps and formulas, and run in phases."""

from collections import defaultdict

import pytest

from tests.train.compiled import SHAPE, B, D, L, T
from tests.train.machines import machine
from tests.train.plan.compiled.test_collectives import large, of, payload
from train.hardware.collective_steps import collective_steps
from train.plan.estimated.arrays import StepPosition
from train.plan.estimated.collectives import Exchange, phases
from train.plan.estimated.local_step import local_step
from train.plan.estimated.step import estimate_step

F32 = 4
EIGHT = ("mesh=fsdp", "data.batch_size=16")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor_only"])
def test_the_loop_over_layers_sends_the_estimated_bytes(stored_step, name):
    """Matrices and activations are exact; XLA chooses how to send small vectors."""
    step = stored_step(name)
    threshold = 8 * F32 * (2 * L + 1) * D
    estimated = defaultdict[str, float](float)
    for e in local_step(step.program).exchanges:
        if e.position.in_layers and e.payload > threshold:
            estimated[e.kind] += e.payload
    compiled = {}
    for kind in {c.kind for c in large(step.collectives) if c.count == L}:
        scopes = ("layers forward", "layers backward")
        collectives = [c for s in scopes for c in of(step.collectives, s, kind)]
        in_loop = [c for c in collectives if c.count == L]
        compiled[kind] = payload(in_loop, leave="norm")
    assert estimated == compiled != {}


def test_a_ring_sends_keys_values_and_their_gradients(composed, lay_out):
    overrides = (*SHAPE, "model.attention=xla", "mesh.fsdp=1", "mesh.context=16")
    exchanges = local_step(lay_out(composed(overrides), "v5p-32")).exchanges
    sent_bytes = sum(e.payload for e in exchanges if e.kind == "collective-permute")
    chunk = B * T // 16
    keys = 2 * chunk * D  # Values are as large as keys.
    documents = 4 * chunk
    forward = 15 * (2 * keys + documents)
    gradients = 16 * 2 * (2 * keys)  # Both are in float32.
    assert sent_bytes == pytest.approx(L * (2 * forward + gradients), rel=2e-3)


def test_a_ring_of_latents_sends_latents_and_their_gradients(composed, lay_out):
    latent = ("model.mixer=latent_attention", "model.kv_rank=64", "model.qk_norm=false")
    latent += ("model.nope_head_dim=32", "model.rope_head_dim=16")
    ring = ("mesh.fsdp=1", "mesh.context=16", "mesh.context_attention=ring")
    overrides = (*SHAPE, "model.attention=xla", "model.num_kv_heads=null", *latent)
    exchanges = local_step(lay_out(composed([*overrides, *ring]), "v5p-32")).exchanges
    sent_bytes = sum(e.payload for e in exchanges if e.kind == "collective-permute")
    chunk = B * T // 16
    latents = 2 * chunk * (64 + 16)
    documents = 4 * chunk
    forward = 15 * (latents + documents)
    gradients = 16 * 2 * latents  # They are in float32.
    assert sent_bytes == pytest.approx(L * (2 * forward + gradients), rel=5e-3)


def test_a_token_shift_gathers_a_quarter_of_one_position(composed, lay_out):
    def gathered_bytes(token_shift):
        mesh = ("mesh.fsdp=1", "mesh.context=16", "mesh.context_attention=all_gather")
        shape = (*SHAPE, "model.attention=xla", f"model.token_shift={token_shift}")
        exchanges = local_step(lay_out(composed([*shape, *mesh]), "v5p-32")).exchanges
        return sum(e.payload for e in exchanges if e.kind == "all-gather")

    assert gathered_bytes("mlp") - gathered_bytes("none") == L * 16 * B * 2 * D / 4


@pytest.mark.parametrize(
    ("experts", "copies"),
    [
        ((), 3),  # There is one expert on each device.
        (("num_experts=32",), 8 * (1 - (7 / 8) ** 3)),
        (
            ("num_experts=32", "router_groups=8", "router_groups_kept=2"),
            2 * (1 - (1 / 2) ** 3),
        ),
    ],
)
def test_copies_travel_to_the_devices_of_their_experts(
    composed, lay_out, experts, copies
):
    """Copies travel there and back, there again if recomputed, and back as gradients.

    A token has one copy for each device of its three experts. The compiled step sends
    the same (docs/log). TPUs send the labels of a copy as a whole vector.
    """
    shape = (
        *(f"model.{override}" for override in experts),
        "model=moe_nano",
        "model.num_layers=3",
        "model.vocab_size=256",
    )
    mesh = ("mesh.fsdp=1", "mesh.expert=8", "train.remat=full", "tracker=none")
    data = ("data.batch_size=16", "data.sequence_length=128", "model.attention=xla")
    exchanges = local_step(lay_out(composed([*shape, *mesh, *data]), "v5e-8")).exchanges
    sent_bytes = sum(e.payload for e in exchanges if e.kind == "ragged-all-to-all")
    rows = 2 * 128 * copies
    width = 128
    expected = 2 * rows * (5 * 2 * width + 3 * 4 * 128)
    assert sent_bytes == pytest.approx(expected, rel=1e-3)


WINDOWED = (
    *("mesh=fsdp_tensor", "mesh.tensor=4", "mesh.activations.embed=tensor"),
    "train.remat=dots",
)


def test_activations_along_embed_travel_around_the_parts_of_products(composed, lay_out):
    """Activations are gathered for products, and their results are scattered.

    A layer gathers the inputs of attention and of the MLP in either direction, two
    cotangents, and attention's output for a gradient. It scatters two results and five
    cotangents. The compiled step of a larger model has 14.3 of these rings (docs/log).
    No weight is gathered along tensor.
    """
    program = lay_out(composed([*SHAPE, "data.batch_size=16", *WINDOWED]), "v5p-32")
    exchanges = [e for e in local_step(program).exchanges if e.position.in_layers]
    along_tensor = [e for e in exchanges if e.axes == ("tensor",)]
    rows = 16 // 4
    ring = (4 - 1) / 4 * rows * T * D * 2
    sent = sum(e.payload for e in along_tensor if e.kind == "collective-permute")
    assert sent == pytest.approx(14 * L * ring)
    others = sum(e.payload for e in along_tensor if e.kind != "collective-permute")
    assert others < 0.02 * sent, "only sums of norms"


def test_compiled_steps_say_which_collectives_are_hidden(composed):
    def hidden(target, kind, axes=("fsdp",), has_experts=False):
        setup = machine(composed, target, ["mesh=fsdp", "data.batch_size=128"])
        collective = exchange(kind)._replace(axes=axes)
        phase, *_ = phases(collective, setup.mesh, has_experts=has_experts)
        return phase.overlapped

    assert hidden("v5e-64", "all-gather") > 0.9
    assert hidden("v5e-64", "reduce-scatter") == 0
    assert hidden("v5p-128", "all-gather") == hidden("v5p-128", "reduce-scatter") == 0
    assert hidden("v6e-64", "reduce-scatter") > 0.5
    assert hidden("v5e-64", "all-gather", has_experts=True) == 0
    assert hidden("h100-8", "all-gather") == 0, "GPUs' rates include the overlap"


@pytest.mark.parametrize("name", ["llama_nano", "mixtral_nano"])
def test_only_layers_with_experts_hide_no_gather(composed, lay_out, name):
    """A dense model has a number of experts too, which nothing uses."""
    overrides = (f"model={name}", "mesh=fsdp", "data.batch_size=16", "tracker=none")
    program = lay_out(composed(overrides), "v5e-16")
    forward = estimate_step(program).sections[0]
    gathers = [total for total in forward.sent if total.kind == "all-gather"]
    assert gathers
    is_dense = program.config.model.expert_layers == 0
    assert all((total.overlapped > 0.9) is is_dense for total in gathers)


def exchange(kind, members=()):
    return Exchange(("fsdp",), kind, 800.0, StepPosition(1, "layers"), members)


def phases_on(mesh, *fields):
    return {
        (p.network, p.kind, p.payload, p.sent) for p in phases(exchange(*fields), mesh)
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Each of four chips in a slice sends its quarter of the slice's half.
        (
            ("all-gather",),
            {("DCN", "all-gather", 200, 100), ("ICI", "all-gather", 800, 600)},
        ),
        # XLA does not scatter in the slice what it scatters between slices.
        (
            ("reduce-scatter",),
            {("DCN", "reduce-scatter", 200, 100), ("ICI", "all-reduce", 800, 1200)},
        ),
        (("all-to-all",), {("DCN", "all-to-all", 800, 400)}),
        # Neighbours are in different slices. The members are two of each slice, then
        # one of each slice, then two of one slice.
        (
            ("all-gather", (0, 1, 4, 5)),
            {("DCN", "all-gather", 400, 200), ("ICI", "all-gather", 800, 400)},
        ),
        (("reduce-scatter", (0, 1)), {("DCN", "reduce-scatter", 800, 400)}),
        (("reduce-scatter", (0, 2)), {("ICI", "reduce-scatter", 800, 400)}),
    ],
)
def test_between_slices_a_chip_sends_its_share(composed, fields, expected):
    mesh = machine(composed, "v5e-4x2", [*EIGHT, "mesh.dcn.fsdp=2"]).mesh
    assert phases_on(mesh, *fields) == expected


def test_rings_of_gpus_go_through_all_nodes(composed):
    mesh = machine(composed, "v5e-8", EIGHT).mesh
    assert phases_on(mesh, "reduce-scatter") == {("ICI", "reduce-scatter", 800, 700)}
    mesh = machine(composed, "h100-4x2", EIGHT).mesh
    assert phases_on(mesh, "all-gather") == {("network", "all-gather", 800, 700)}


def test_a_scatter_over_a_torus_is_timed_in_its_steps(composed):
    """A 4 x 4 x 4 torus has planes of 16 with four links, and lines of 4 with two."""
    mesh = machine(composed, "v5p-128", ["mesh=fsdp"]).mesh
    steps = collective_steps(mesh)
    plane, line = phases(exchange("reduce-scatter"), mesh, steps)
    assert (plane.sent, plane.links) == (800 * 15 / 16, 4)
    assert (line.sent, line.links) == (50 * 3 / 4, 2)
    (gather,) = phases(exchange("all-gather"), mesh, steps)
    assert (gather.sent, gather.links) == (800 * 63 / 64, 6)


@pytest.mark.parametrize(("kind", "links"), [("all-gather", 6), ("reduce-scatter", 2)])
def test_a_scatter_of_tpu7x_is_one_ring_as_compiled(composed, kind, links):
    """The slice has rings along three dims."""
    mesh = machine(composed, "tpu7x-128", ["mesh=fsdp", "data.batch_size=128"]).mesh
    (phase,) = phases(exchange(kind), mesh)
    assert phase.links == links
