"""What a layer's backward pass has of its forward pass: kept, or computed again.

What is kept waits in the device's memory, or, by name, in the host's. Recomputation is
the same mathematics in the same order: losses and gradients stay what they are to
rounding, memory and time change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, checkpoint_name
from jaxtyping import Array, Float

from model.config import Intermediate, OffloadName

Policy = str | tuple[str, ...]  # none, dots, full; or names of Intermediate
_INPUT: OffloadName = "residual"
# cuDNN's forward pass gives its output and log-sum-exp no names: the primitive of
# jax.nn.dot_product_attention stands for both.
_CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"


def layer_input(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Name what a layer starts from, which is kept whatever it recomputes."""
    return checkpoint_name(x, _INPUT)


def named(x: Float[Array, "..."], what: Intermediate) -> Float[Array, "..."]:
    """Name an intermediate result, so that a policy can keep it."""
    return checkpoint_name(x, what)


def rematerialized(
    layer: Callable,
    policy: Policy,
    offload: Sequence[OffloadName],
    looped: bool,
    branches: bool = False,
) -> Callable:
    """Return the layer, its results recomputed in the backward pass as a policy says.

    Args:
        layer: a function of arrays.
        policy: which of its intermediate results are kept: all (none is recomputed),
            those of products with a weight (dots), no one (full), or those named.
        offload: names of results that are kept in host memory, whatever the policy.
        looped: whether a loop of more than one iteration runs over it.
        branches: whether it is a choice between branches: what these keep of their
            arguments, weights among them, is kept once more unless a policy says what.
    """
    # With `offload` train/cli/rules.py refuses it.
    if policy == "none" and not branches:
        return layer
    keep = _offloading(offload, _keep(policy)) if offload else _keep(policy)
    # A loop keeps XLA from undoing the recomputation; without one it has to be told.
    return jax.checkpoint(layer, policy=keep, prevent_cse=not looped)


def rematerialized_stage(stage: Callable, policy: Policy) -> Callable:
    """Return a pipeline's stage, which keeps what its layers do and no weight.

    Else it would keep the layers that it took of the device's in each iteration.

    Args:
        stage: a function of arrays; it slices parameters, and its layers are named.
        policy: of its layers.
    """
    inputs = jax.checkpoint_policies.save_only_these_names(_INPUT)
    keep = _keep_all_but_slices if policy == "none" else _keep(policy)
    both = jax.checkpoint_policies.save_from_both_policies(inputs, keep)
    return jax.checkpoint(stage, policy=both, prevent_cse=False)


def _keep_all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name != "dynamic_slice"


def _keep(policy: Policy) -> Callable[..., Any]:
    save = jax.checkpoint_policies
    if policy == "none":
        return save.everything_saveable
    if policy == "dots":
        return save.dots_with_no_batch_dims_saveable
    if isinstance(policy, str):
        assert policy == "full"
        return save.nothing_saveable
    names = save.save_only_these_names(*policy)
    if "attention" not in policy:
        return names
    return save.save_from_both_policies(names, _is_cudnn_forward)


def _offloading(names: Sequence[OffloadName], keep: Callable) -> Callable[..., Any]:
    """Return a policy that keeps some results in host memory, others as another one."""

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        kernel = "attention" in names and _is_cudnn_forward(primitive)
        if kernel or (primitive.name == "name" and params["name"] in names):
            return Offloadable(src="device", dst="pinned_host")
        return keep(primitive, *avals, **params)

    return policy


def _is_cudnn_forward(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name == _CUDNN_FORWARD
