"""One layer, attention and then an MLP or experts; and stacks of them, run by a scan.

Shapes: B batch, T time, D embed, F mlp, L layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention.cache import KeysValues
from model.attention.xla import Local
from model.choices import NormPlacement
from model.config import ModelConfig
from model.dropout import drop
from model.execution import Execution
from model.experts.experts import Experts
from model.experts.router import Routing
from model.layers import MLP, Normalize, SelfAttention
from model.parts import in_branch, part
from model.remat import layer_input, rematerialized
from model.rope import Rotations
from model.taps import Taps


class Block(nnx.Module):
    """Residual block: x + norm(attention(norm x)), then x + norm(mlp(norm x)).

    Of the norms there are those before, the usual ones, or those after, or both.
    """

    def __init__(self, config: ModelConfig, routed: bool, rngs: nnx.Rngs):
        """Make one layer, `routed` to experts or with one MLP."""
        F, self.dropout = config.mlp_size, config.dropout.residual

        def norm(*places: NormPlacement) -> Normalize | None:
            if config.norm_placement not in places:
                return None
            return Normalize(config, config.norm, embed=config.embed_dim)

        before = NormPlacement.before, NormPlacement.both
        after = NormPlacement.after, NormPlacement.both
        self.attention_norm = norm(*before)
        self.attention = SelfAttention(config, rngs)
        self.attention_output_norm = norm(*after)
        self.mlp_norm = norm(*before)
        self.mlp = Experts(config, rngs) if routed else MLP(config, F, rngs)
        self.mlp_output_norm = norm(*after)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        by: Rotations | None,
        segment_ids_BT: Int[Array, "B T"] | None,
        how: Execution,
        cache: KeysValues | None,
        local: Local | bool,
    ) -> tuple[Float[Array, "B T D"], KeysValues | None, Routing | None]:
        """Run one layer; a local one sees the model's window only."""
        how.note("residual", x_BTD)
        a_BTD = _through(self.attention_norm, x_BTD)
        with part("attention"):
            a_BTD, cache = self.attention(a_BTD, by, segment_ids_BT, how, cache, local)
        how.note("attention", a_BTD)
        a_BTD = _through(self.attention_output_norm, a_BTD)
        a_BTD = drop(a_BTD, self.dropout, "attention_output", how)
        x_BTD = how.rules.constrain(x_BTD + a_BTD, "batch", "seq", "embed")
        h_BTD, routing = _through(self.mlp_norm, x_BTD), None
        with part("mlp"):
            if isinstance(self.mlp, Experts):
                h_BTD, routing = self.mlp(h_BTD, how)
            else:
                h_BTD = self.mlp(h_BTD, how)
            how.note("mlp", h_BTD)
            h_BTD = _through(self.mlp_output_norm, h_BTD)
            x_BTD = x_BTD + drop(h_BTD, self.dropout, "mlp_output", how)
        return how.rules.constrain(x_BTD, "batch", "seq", "embed"), cache, routing


def _through(
    norm: Normalize | None, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    return x_BTD if norm is None else norm(x_BTD)


def make_stack(config: ModelConfig, depth: int, routed: bool, rngs: nnx.Rngs) -> Block:
    """Make layers of one kind, their parameters stacked."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> Block:
        return Block(config, routed, rngs)

    return stack(rngs)


def depth_of(stack: Block) -> int:
    """Return how many layers are stacked."""
    return stack.attention.query.weight.shape[0]


def groups_of(stacks: Sequence[Block]) -> tuple[int, list[int]]:
    """Return how many groups of layers stacks make, and how many layers of each in one.

    A group ends with a layer of the last stack.
    """
    groups = depth_of(stacks[-1])
    return groups, [depth_of(stack) // groups for stack in stacks]


def run_stacks(
    stacks: Sequence[Block],
    x_BTD: Float[Array, "B T D"],
    by: Rotations | None,
    segment_ids_BT: Int[Array, "B T"] | None,
    how: Execution,
    caches: Sequence[KeysValues] | None,
    local: Sequence[bool],
    precise: Sequence[bool],
    unroll: int,
    first: jax.Array | int = 0,
) -> tuple[Float[Array, "B T D"], tuple[KeysValues, ...] | None, Routing | None]:
    """Run stacked layers by a loop, in each iteration whole groups.

    Args:
        stacks: of one kind of layers each.
        x_BTD: what goes in.
        by: rotations of queries and keys.
        segment_ids_BT: documents.
        how: execution.
        caches: of the layers in each place of a group.
        local: which layers are local, in the order in which they run; the loop is told
            so one by one, unless those in the same place of each group are alike.
        precise: which have no products of eight bits, likewise; of a pipeline's, those
            of all stages.
        unroll: layers in each iteration, if that is a group; -1: all, without a loop.
        first: number of the first of these layers, for what is drawn at random.

    Returns:
        x_BTD, the longer caches if there were any, and what the routers of the last
        stack did, if it has some.
    """
    groups, sizes = groups_of(stacks)
    size = sum(sizes)
    blocks, params = zip(*map(nnx.split, stacks), strict=True)
    blocks = [block for block, n in zip(blocks, sizes, strict=True) for _ in range(n)]
    unroll = groups if unroll == -1 else min(max(unroll // size, 1), groups)

    def layer(place: int, x_BTD: Float[Array, "B T D"], of_layer):
        number, params, cache, flag, kept = of_layer
        drawing = how if number is None else how.drawing(number)
        here = local[place] if flag is None else Local(flag, sum(local), len(local))

        def run(x_BTD: Float[Array, "B T D"], params: Any, cache: Any, precise: bool):
            own = drawing.precise if precise else drawing
            taps = None if how.taps is None else Taps(exact=precise)
            block = nnx.merge(blocks[place], params)
            own = own._replace(taps=taps)
            x_BTD, *rest = block(x_BTD, by, segment_ids_BT, own, cache, here)
            return x_BTD, (*rest, taps and taps.of_layer())

        arguments = layer_input(x_BTD), params, cache
        if kept is None:
            return run(*arguments, precise=precise[place])
        times, of = sum(precise[place::size]), len(precise[place::size])
        kinds = (
            in_branch(partial(run, precise=True), times, of),
            in_branch(partial(run, precise=False), of - times, of),
        )
        return jax.lax.cond(kept, *kinds, *arguments)

    def group(x_BTD: Float[Array, "B T D"], of_group):
        numbers, params, caches, *flags = of_group
        pairs = zip(params, sizes, strict=True)
        params = [own for stack, n in pairs for own in _each(stack, n)]
        rests = list[Any]()
        for place, of in enumerate(zip(numbers, params, caches, *flags, strict=True)):
            # Of several layers a backward pass has one at a time recomputed.
            looped, branches = unroll < groups and size == 1, of[-1] is not None
            kept = how.remat, how.offload, looped, branches
            run = rematerialized(partial(layer, place), *kept)
            x_BTD, rest = run(x_BTD, of)
            rests.append(rest)
        caches, routings, noted = zip(*rests, strict=True)
        return x_BTD, (caches, routings[-1], noted)

    def by_place(kinds: Sequence[bool], start: jax.Array | int) -> list[Any]:
        orders = [kinds[place::size] for place in range(size)]
        flags = [jnp.asarray(own) if len({*own}) > 1 else None for own in orders]
        if len(orders[0]) == groups:
            return flags
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start)
        return jax.tree.map(lambda own: cut(own, slice_size=groups), flags)

    nothing = [None] * size
    numbers = [first + jnp.arange(i, groups * size, size) for i in range(size)]
    stacked = [
        tree if n == 1 else jax.tree.map(partial(_cut, n), tree)
        for tree, n in zip(params, sizes, strict=True)
    ]
    with jax.named_scope("layers"):
        x_BTD, (longer, routing, noted) = jax.lax.scan(
            group,
            x_BTD,
            (
                nothing if how.keys_BT is None else numbers,
                stacked,
                caches or nothing,
                by_place(local, 0),
                by_place(precise, first // size),
            ),
            unroll=True if unroll == groups else unroll,
        )
    if how.taps is not None:
        how.taps.put(jax.tree.map(lambda *each: jnp.stack(each, 1).ravel(), *noted))
    return x_BTD, longer if caches else None, routing


def _cut(size: int, stacked: jax.Array) -> jax.Array:
    return stacked.reshape(-1, size, *stacked.shape[1:])


def _each(params: Any, size: int) -> list[Any]:
    """Return the layers of one kind in a group, one by one."""
    if size == 1:
        return [params]
    leaves, tree = jax.tree.flatten(params)
    return [tree.unflatten(own) for own in zip(*map(jnp.unstack, leaves), strict=True)]
