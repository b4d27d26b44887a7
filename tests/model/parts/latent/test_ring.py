"""Latents in a ring give attention to the keys and values that they expand to."""

from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from model.attention import xla
from model.axes import AxisRules
from model.choices import Attention, ContextAttention
from model.execution import Execution, Numerics
from model.parts.attention import KernelAttention
from model.parts.context.context_parallel import KERNELS
from model.parts.context.ring import in_ring_order
from model.parts.latent.ring import attend_in_latent_ring
from model.placement import Placement
from tests.model.reference import attend, mask

B = 2
N = 3
RANK = 8
NOPE = 6
ROPE = 4
V = 5
AXES = ("context",)


@pytest.fixture
def one_width(monkeypatch):
    """Replace cuDNN's kernel with a stand-in that also takes a single head dim."""

    def check_dims(kernel, chunks, *args):
        assert chunks.q_BNTH.shape[-1] == chunks.v_BKSV.shape[-1]
        return kernel(chunks, *args)

    stand_in = ModuleType("stand_in")
    forward = partial(check_dims, xla.forward)
    backward = partial(check_dims, xla.backward)
    vars(stand_in).update(SCALES_QUERIES=True, forward=forward, backward=backward)
    monkeypatch.setitem(KERNELS, Attention.cudnn, stand_in)


def make_ring(c: int, attention: Attention):
    """Return a function of whole rows that attends in a ring of c devices.

    It takes queries, latents, the weight and segment ids in the order of a ring, and
    returns the attention in that order.
    """
    mesh = Mesh(jax.devices()[:c], AXES)
    rules = AxisRules(activations=(("batch", None), ("seq", "context")))
    execution = Execution(
        numerics=Numerics(compute_dtype=jnp.dtype(jnp.float32)),
        placement=Placement(mesh=mesh, rules=rules),
        attention=KernelAttention(attention, ContextAttention.ring),
    )
    rows = PartitionSpec(None, "context")

    def attend(*inputs):
        return attend_in_latent_ring(*inputs, nope_dim=NOPE, execution=execution).o_BTNV

    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(rows, rows, PartitionSpec(), rows),
        out_specs=rows,
        check_vma=False,
    )


def ring_order(c: int, T: int) -> np.ndarray:
    """Return the positions of a row in the order of the devices of a ring."""
    mesh = Mesh(jax.devices()[:c], AXES)
    rows = PartitionSpec(None, "context")
    order = partial(in_ring_order, axes=AXES)
    order = jax.shard_map(order, mesh=mesh, in_specs=rows, out_specs=rows)
    return np.asarray(order(jnp.arange(T)[None]))[0]


def attend_expanded(q, latent, weight, visible):
    """Attend to the keys and values of the latents of whole rows."""
    c = latent[..., :RANK]
    k_rope = latent[..., None, RANK:]
    kv = jnp.einsum("btr,rne->btne", c, weight)
    k = jnp.concatenate([kv[..., :NOPE], jnp.repeat(k_rope, N, axis=2)], axis=-1)
    return attend(q, k, kv[..., NOPE:], visible)


@pytest.mark.usefixtures("one_width")
@pytest.mark.parametrize(
    ("c", "kernel"),
    [
        (3, Attention.xla),
        pytest.param(8, Attention.xla, marks=pytest.mark.slow),
        pytest.param(2, Attention.cudnn, marks=pytest.mark.slow),
    ],
)
def test_a_ring_of_latents_is_attention_to_their_keys_in_float64(c, kernel):
    """The gradients of queries, latents and the weight agree too. Rows are packed."""
    T = 4 * c
    normal = np.random.default_rng(0).normal
    shapes = (B, T, N, NOPE + ROPE), (B, T, RANK + ROPE), (RANK, N, NOPE + V)
    *operands, do = [normal(size=shape) for shape in (*shapes, (B, T, N, V))]
    ids = np.stack([np.arange(T) // 5 + 1, np.ones(T)]).astype(np.int32)
    visible = mask(T, None)[None, None] & (ids[:, None, :, None] == ids[:, None, None])
    with jax.enable_x64(True):
        attention = partial(attend_expanded, visible=visible)
        o, transpose = jax.vjp(attention, *map(jnp.asarray, operands))
        expected = [np.asarray(x) for x in (o, *transpose(jnp.asarray(do)))]
    order = ring_order(c, T)

    @jax.jit
    def ring(q, latent, weight, do):
        def in_order(q, latent, weight):
            inputs = q[:, order], latent[:, order], weight, ids[:, order]
            o = make_ring(c, kernel)(*inputs)
            return o[:, np.argsort(order)]

        o, transpose = jax.vjp(in_order, q, latent, weight)
        return o, *transpose(do)

    actual = ring(*(jnp.float32(x) for x in (*operands, do)))
    for array, expected_array in zip(actual, expected, strict=True):
        assert np.linalg.norm(array - expected_array) < 3e-6 * np.linalg.norm(
            expected_array
        )
