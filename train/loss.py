"""Next-token cross-entropy in float32, logits existing a tile at a time when large.

Shapes: B batch, T time, C positions of a tile, D embed, V vocab.
"""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from data.batches import Batch
from model.axes import ANYWHERE, MeshAxes, mesh_axes
from model.config import ModelConfig
from model.gpt import GPT, project
from model.layers import Execution
from model.parts import part

_LARGE_VOCAB = 8192  # from here on logits are tiled unless the config says otherwise
_TILE = 128


def loss_sum(
    model: GPT,
    batch: Batch,
    how: Execution,
    z_loss: float,
    chunk: int | None,
    head: PartitionSpec,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the loss over a batch's targets; those that are negative do not count.

    Args:
        model: with its parameters bound.
        batch: int32 [B, T] fields.
        how: execution.
        z_loss: weight of log²Z, which keeps logits from drifting (PaLM, section 5).
        chunk: positions C of a row whose logits exist at once; None: all of a row's
            with a small vocabulary, else about 128.
        head: where `model.head_weight` lies.

    Returns:
        float32 scalars: what to minimize, and the cross-entropy in nats alone, which
        has no gradient.
    """
    x_BTD, _ = model.features(batch.inputs, batch.positions, batch.segment_ids, how)
    C = tile(x_BTD.shape[1], model.config.vocab_size or 0, chunk)
    tiled = _Tiled(C, model.config, how, z_loss, head)
    with jax.named_scope("loss"), part("head"):
        return _sums(tiled, x_BTD, model.head_weight, batch.targets)


def tile(T: int, V: int, chunk: int | None) -> int:
    """Return C, the positions of a tile: a divisor of T, at most `chunk`."""
    most = chunk or (_TILE if V >= _LARGE_VOCAB else T)
    return next(c for c in range(min(most, T), 0, -1) if T % c == 0)


class _Tiled(NamedTuple):
    """The loss in tiles of C positions of a row, with its gradient by hand.

    The head's weight W[D_fsdp, V_tensor], rounded to the compute dtype, is gathered
    over fsdp once for all tiles: each device holds W[D, V_tensor]. Each multiplies its
    own rows x[B_(data, fsdp), C, D] tile by tile, and adds up the float32 gradient
    dW[D, V_tensor] of its rows over all tiles. That sum is then reduce-scattered over
    fsdp back to dW[D_fsdp, V_tensor], and all-reduced over what is left of the batch's
    axes (data), each once a step. The softmax over V_tensor costs an all-reduce over
    tensor of the maxima, the sums, and the targets' logits, [B, C] each, and one of
    dx[B, C, D]. Where the batch lies on tensor too, V is gathered like D.

    V is `vocab_rows`; entries that stand for no token get the logit -inf.
    """

    C: int
    config: ModelConfig
    how: Execution
    z_loss: float
    head: PartitionSpec

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        weight: Float[Array, "in out"],
        targets_BT: Int[Array, "B T"],
        gradients: bool,
    ):
        """Sum over all rows: (loss, nats), and the loss' (dx, dweight) or None."""
        rules = self.how.rules
        if not rules.pairs:
            return self._scan(x_BTD, weight, targets_BT, (), gradients)
        rows = rules.spec("batch")
        return jax.shard_map(
            partial(self._on_a_device, gradients=gradients),
            in_specs=(rows, self.head, rows),
            out_specs=(PartitionSpec(), (rows, self.head) if gradients else None),
            check_vma=False,
        )(x_BTD, weight, targets_BT)

    def _on_a_device(self, x_BTD, weight, targets_BT, gradients: bool):
        vocab_dim, dtype = 0 if self.config.tied_head else 1, weight.dtype
        batch = _wide(self.how.rules.spec("batch")[0])
        gathers = [_wide(on) for on in self.head]
        cut = gathers[vocab_dim]
        if {*cut} & {*batch}:
            cut = ()
        else:
            gathers[vocab_dim] = ()
        weight = weight.astype(self.how.compute_dtype)
        for dim, axes in enumerate(gathers):
            if axes:
                weight = jax.lax.all_gather(weight, axes, axis=dim, tiled=True)
        sums, grads = self._scan(x_BTD, weight, targets_BT, cut, gradients)
        sums = jax.lax.psum(sums, batch)
        if grads is None:
            return sums, None
        dx_BTD, dweight = grads
        for dim, axes in enumerate(gathers):
            if axes:
                dweight = jax.lax.psum_scatter(
                    dweight, axes, scatter_dimension=dim, tiled=True
                )
        rest = [axis for axis in batch if axis not in itertools.chain(*gathers)]
        copies = [axis for axis in itertools.chain(*gathers) if axis not in batch]
        dweight = jax.lax.psum(dweight, rest) / jax.lax.psum(1, copies)
        return sums, (dx_BTD, dweight.astype(dtype))

    def _scan(self, x_BTD, weight, targets_BT, cut, gradients: bool):
        def tiles(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [T/C, B, C, ...]
            shape = x.shape[0], x.shape[1] // self.C, self.C, *x.shape[2:]
            return jnp.moveaxis(x.reshape(shape), 1, 0)

        def add(total, tile):
            part, dx_BCD = self._tile(tile[0], weight, tile[1], cut, gradients)
            return jax.tree.map(jnp.add, total, part), dx_BCD

        zero = jnp.zeros((), jnp.float32)
        dweight = jnp.zeros(weight.shape, jnp.float32) if gradients else None
        start = (zero, zero), dweight
        (sums, dweight), dx = jax.lax.scan(
            add, start, (tiles(x_BTD), tiles(targets_BT))
        )
        if dx is None:
            return sums, None
        return sums, (jnp.moveaxis(dx, 0, 1).reshape(x_BTD.shape), dweight)

    def _tile(
        self,
        x_BCD: Float[Array, "B C D"],
        weight: Float[Array, "in out"],
        targets_BC: Int[Array, "B C"],
        cut: tuple[str, ...],
        gradients: bool,
    ):
        """Return ((loss, nats), dweight) and dx; axes of `cut` share the vocabulary."""
        how = self.how._replace(rules=ANYWHERE)
        logits_BCV, transpose = jax.vjp(
            lambda x, weight: project(x, weight, self.config, how),
            x_BCD,
            weight.astype(jnp.float32),  # so that its gradient is, too
        )
        V, size = logits_BCV.shape[-1], self.config.vocab_size
        ids_11V = (jnp.arange(V) + (V * jax.lax.axis_index(cut) if cut else 0))[
            None, None
        ]
        if size != self.config.vocab_rows:  # what only pads has no probability
            logits_BCV = jnp.where(ids_11V < (size or 0), logits_BCV, -jnp.inf)
        most_BC = jnp.max(logits_BCV, axis=-1)
        most_BC = jax.lax.pmax(most_BC, cut) if cut else most_BC
        Z_BC = jnp.sum(jnp.exp(logits_BCV - most_BC[..., None]), axis=-1)
        log_z_BC = most_BC + jnp.log(jax.lax.psum(Z_BC, cut))
        # A masked sum instead of a gather: no logits travel.
        is_target_BCV = ids_11V == targets_BC[..., None]
        target_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
        target_BC = jax.lax.psum(target_BC, cut)
        counts = targets_BC >= 0
        nats = jnp.sum(jnp.where(counts, log_z_BC - target_BC, 0.0))
        z = jnp.sum(jnp.where(counts, jnp.square(log_z_BC), 0.0))
        sums = nats + self.z_loss * z, nats
        if not gradients:
            return (sums, None), None
        probabilities_BCV = jnp.exp(logits_BCV - log_z_BC[..., None])
        factor_BC1 = (1 + 2 * self.z_loss * log_z_BC)[..., None]
        dlogits_BCV = factor_BC1 * probabilities_BCV - is_target_BCV
        dx_BCD, dweight = transpose(jnp.where(counts[..., None], dlogits_BCV, 0.0))
        return (sums, dweight), jax.lax.psum(dx_BCD, cut)


def _wide(entry: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes of a dim that are more than one device wide."""
    return tuple(axis for axis in mesh_axes(entry) if jax.lax.psum(1, axis) > 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(tiled: _Tiled, x_BTD, weight, targets_BT):
    return tiled(x_BTD, weight, targets_BT, gradients=False)[0]


def _forward(tiled: _Tiled, x_BTD, weight, targets_BT):
    # The loss is a sum, so its gradient is known here but for one factor: no tile's
    # logits are made twice.
    return tiled(x_BTD, weight, targets_BT, gradients=True)


def _backward(tiled: _Tiled, gradients, cotangents):
    factor, _ = cotangents
    dx, dweight = jax.tree.map(lambda x: (factor * x).astype(x.dtype), gradients)
    return dx, dweight, None


_sums.defvjp(_forward, _backward)
