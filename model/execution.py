"""How a model is run, as opposed to what it computes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.axes import ANYWHERE, AxisRules
from model.choices import (
    Attention,
    ComputeDtype,
    ContextAttention,
    ExpertExchange,
    Grouped,
    OffloadName,
)
from model.eight_bits.quantization import Quantization
from model.remat import Policy
from model.taps import Taps


class AxisSteps(NamedTuple):
    """The steps of gathers and scatters along a mesh axis, on TPUs.

    A scatter of n devices in steps of (p, q) has p devices far apart add up first, then
    q neighbours; a gather goes the other way. The last number is that of the slices
    that the axis lies in, with neighbours in different ones (train/mesh.py).

    gather: of a weight.
    small: of a small weight.
    scatter: of a gradient.
    """

    axis: str
    gather: tuple[int, ...]
    small: tuple[int, ...]
    scatter: tuple[int, ...]


class Execution(NamedTuple):
    """Dtypes, kernel, recomputation and placement.

    activation_dtype: of what passes between layers.
    compute_dtype: of products' operands, and of weights that are gathered.
    quantization: of linear layers to eight bits; None: they are as other products.
    expert_quantization: likewise of experts' matrices, float8 or None.
    keys_BT: of each position, by which int8 rounds at random and dropout leaves out;
        None: it rounds to the nearest, and nothing is left out.
    reduce_dtype: in which weights' gradients travel between devices.
    platform: for which XLA compiles it: cpu, gpu, or tpu.
    steps: of gathers and scatters along mesh axes; along others they take one step.
    reduces_copies: whether gradients of matrices are added up over copies of these in
        each backward pass; else that is left to the caller.
    attention: the kernel.
    context_attention: what it attends across devices with that share a row.
    expert_exchange: how tokens reach experts on other devices; never auto.
    grouped: body of products of rows grouped by expert.
    remat: what the backward pass recomputes, or names of what it keeps.
    offload: names of what is kept for it in host memory.
    rules: where arrays lie.
    pipeline_microbatches: that pass through the stages one after another, where layers
        lie on several.
    pipeline_repeats: how often each does.
    trained_length: with a cache, how many of the newest keys are seen; None: all.
    taps: what layers tell how large their results are; None: nobody watches.
    """

    activation_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    compute_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    quantization: Quantization | None = None
    expert_quantization: Quantization | None = None
    keys_BT: jax.Array | None = None
    reduce_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    platform: str = "cpu"
    steps: tuple[AxisSteps, ...] = ()
    reduces_copies: bool = False
    attention: Attention = Attention.xla
    context_attention: ContextAttention = ContextAttention.ring
    expert_exchange: ExpertExchange = ExpertExchange.all_gather
    grouped: Grouped = Grouped.scan
    remat: Policy = "none"
    offload: tuple[OffloadName, ...] = ()
    rules: AxisRules = ANYWHERE
    pipeline_microbatches: int = 1
    pipeline_repeats: int = 1
    trained_length: int | None = None
    taps: Taps | None = None

    def note(self, name: str, x: jax.Array) -> None:
        """Tell whoever watches how large a result of a layer is."""
        if self.taps is not None:
            self.taps.note(name, x)

    @property
    def precise(self) -> "Execution":
        """The same without products of eight bits."""
        return self._replace(quantization=None, expert_quantization=None)

    @property
    def rounds_at_random(self) -> bool:
        """Whether linear layers need keys."""
        quantization = self.quantization
        return quantization is not None and quantization.dtype is ComputeDtype.int8

    def drawing(self, what: int | jax.Array) -> "Execution":
        """Return it with other keys, those of a part of the program."""
        if self.keys_BT is None:
            return self
        fold_in = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))
        keys_BT = fold_in(self.keys_BT, what)
        return self._replace(keys_BT=keys_BT)
