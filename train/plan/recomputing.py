"""The ways to recompute a layer that a plan weighs, and how to type them.

Bytes kept for each FLOP saved are alike for every product of a layer: in bfloat16
2 / (2 D), D being what it sums over. Attention's output costs 2 / (2 T) by T positions,
and a FLOP of its kernel takes longer than one of a product. So it is kept first, then
what lies around it, and last what the MLP makes, which is the most.
"""

from collections.abc import Sequence
from typing import cast

from model.config import INTERMEDIATES, Intermediate, ModelConfig, OffloadName
from train.config import Remat

RematPolicy = Remat | tuple[Intermediate, ...]

_AROUND: tuple[Intermediate, ...] = ("query", "key", "value", "attention_output")
_MLP: tuple[Intermediate, ...] = ("mlp_gate", "mlp_up")
_ALL = "all that is no product"
# The least is kept by the first, the most by the last.
WAYS: tuple[RematPolicy, ...] = (
    Remat.full,
    ("attention",),
    ("attention", *_AROUND),
    Remat.dots,
    ("attention", *_AROUND, *_MLP),
    Remat.none,
)


def policies_for(model: ModelConfig) -> list[RematPolicy]:
    """Return the ways, the least kept first, but those that keep of no layer more."""
    no_mlp = model.expert_layers == model.num_layers and not model.shared_experts
    return [way for way in WAYS if not (no_mlp and {*_MLP} <= {*way})]


def format_policy(policy: RematPolicy) -> str:
    """Return what to type for a policy: `full`, or `[attention,query]`."""
    if isinstance(policy, Remat):
        return policy.value
    return f"[{','.join(policy)}]"


def parse_policy(text: str) -> RematPolicy:
    """Return the policy that `typed` wrote."""
    if not text.startswith("["):
        return Remat(text)
    names = tuple(filter(None, text.strip("[]").split(",")))
    return cast(tuple[Intermediate, ...], names)


def policies_with_offload(offload: Sequence[OffloadName]) -> list[RematPolicy]:
    """List the ways that do not keep what waits in host memory, the least first."""
    return [way for way in WAYS if not (offload and _kept(way) & {*offload, _ALL})]


def policies_keeping_less(
    policy: RematPolicy, offload: Sequence[OffloadName] = ()
) -> list[RematPolicy]:
    """List the ways that keep a part of what a policy keeps, the most first."""
    beside = reversed(policies_with_offload(offload))
    return [way for way in beside if _kept(way) < _kept(policy)]


def policies_keeping_more(
    policy: RematPolicy, offload: Sequence[OffloadName] = ()
) -> list[RematPolicy]:
    """List the ways that keep more than all that a policy keeps, the least first."""
    return [way for way in policies_with_offload(offload) if _kept(way) > _kept(policy)]


def _kept(policy: RematPolicy) -> frozenset[str]:
    if not isinstance(policy, Remat):
        return frozenset(policy)
    return frozenset(
        {
            Remat.full: (),
            Remat.dots: (*_AROUND, *_MLP),
            Remat.none: (*INTERMEDIATES, _ALL),
        }[policy]
    )
