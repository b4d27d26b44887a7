"""Rematerialisation: which results of a layer the backward pass saves or recomputes.

Saved results stay in the device's memory, or in host memory if the config names them.
Recomputation changes memory and time. Losses and gradients change only by rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, checkpoint_name
from jaxtyping import Array, Float

from model.choices import Intermediate, OffloadName
from model.compat import CUDNN_FORWARD

Policy = str | tuple[str, ...]  # "none", "dots", "full", or names of Intermediate.
_INPUT: OffloadName = "residual"


def name_layer_input(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Name the input of a layer, which is saved under every policy."""
    return checkpoint_name(x, _INPUT)


def saveable(x: Float[Array, "..."], name: Intermediate) -> Float[Array, "..."]:
    """Name an intermediate result, so that a policy can save it."""
    return checkpoint_name(x, name)


def rematerialized(
    layer: Callable,
    policy: Policy,
    offload: Sequence[OffloadName],
    in_loop: bool,
    branches: bool = False,
) -> Callable:
    """Return a layer whose backward pass recomputes what the policy does not save.

    "none" saves all results, "dots" saves products with a weight, "full" saves nothing.
    A tuple saves the results with these names. Results named in `offload` are
    saved in host memory under any policy. `in_loop` says whether a loop of several
    iterations runs the layer, and `branches` whether the layer has a `lax.cond`.
    With branches, "none" uses `jax.checkpoint` too, because the branches would
    otherwise save copies of their arguments, weights included.
    """
    # train/cli/rules.py refuses `offload` with the policy "none".
    if policy == "none" and not branches:
        return layer
    save_policy = _save_policy(policy)
    if offload:
        save_policy = _offload_policy(offload, save_policy)
    # XLA might merge the recomputation with the forward pass. A loop prevents this, and
    # without a loop `prevent_cse` does.
    return jax.checkpoint(layer, policy=save_policy, prevent_cse=not in_loop)


def rematerialized_stage(stage: Callable, policy: Policy) -> Callable:
    """Return a pipeline's stage that saves what its layers save, but no weights.

    With the policy "none", the stage saves everything but slices of the parameters.
    """
    inputs = jax.checkpoint_policies.save_only_these_names(_INPUT)
    save_policy = _save_all_but_slices if policy == "none" else _save_policy(policy)
    save_policy = jax.checkpoint_policies.save_from_both_policies(inputs, save_policy)
    return jax.checkpoint(stage, policy=save_policy, prevent_cse=False)


def _save_all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name != "dynamic_slice"


def _save_policy(policy: Policy) -> Callable[..., Any]:
    policies = jax.checkpoint_policies
    if policy == "none":
        return policies.everything_saveable
    if policy == "dots":
        return policies.dots_with_no_batch_dims_saveable
    if isinstance(policy, str):
        assert policy == "full"
        return policies.nothing_saveable
    save_named = policies.save_only_these_names(*policy)
    if "attention" not in policy:
        return save_named
    return policies.save_from_both_policies(save_named, _is_cudnn_forward)


def _offload_policy(names: Sequence[OffloadName], base: Callable) -> Callable[..., Any]:
    """Return a policy that offloads named results and treats others as `base` does."""

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        is_kernel = "attention" in names and _is_cudnn_forward(primitive)
        if is_kernel or (primitive.name == "name" and params["name"] in names):
            return Offloadable(src="device", dst="pinned_host")
        return base(primitive, *avals, **params)

    return policy


def _is_cudnn_forward(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name == CUDNN_FORWARD
