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

Policy = Remat | tuple[Intermediate, ...]

_AROUND: tuple[Intermediate, ...] = ("query", "key", "value", "attention_output")
_MLP: tuple[Intermediate, ...] = ("mlp_gate", "mlp_up")
_ALL = "all that is no product"
# The least is kept by the first, the most by the last.
WAYS: tuple[Policy, ...] = (
    Remat.full,
    ("attention",),
    ("attention", *_AROUND),
    Remat.dots,
    ("attention", *_AROUND, *_MLP),
    Remat.none,
)


def ways(model: ModelConfig) -> list[Policy]:
    """Return the ways, the least kept first, but those that keep of no layer more."""
    no_mlp = model.expert_layers == model.num_layers and not model.shared_experts
    return [way for way in WAYS if not (no_mlp and {*_MLP} <= {*way})]


def typed(policy: Policy) -> str:
    """Return what to type for a policy: `full`, or `[attention,query]`."""
    if isinstance(policy, Remat):
        return policy.value
    return f"[{','.join(policy)}]"


def parsed(text: str) -> Policy:
    """Return the policy that `typed` wrote."""
    if not text.startswith("["):
        return Remat(text)
    names = tuple(filter(None, text.strip("[]").split(",")))
    return cast(tuple[Intermediate, ...], names)


def ways_beside(offload: Sequence[OffloadName]) -> list[Policy]:
    """List the ways that do not keep what waits in host memory, the least first."""
    return [way for way in WAYS if not (offload and _kept(way) & {*offload, _ALL})]


def keeping_less(policy: Policy, offload: Sequence[OffloadName] = ()) -> list[Policy]:
    """List the ways that keep a part of what a policy keeps, the most first."""
    alternatives = reversed(ways_beside(offload))
    return [way for way in alternatives if _kept(way) < _kept(policy)]


def keeping_more(policy: Policy, offload: Sequence[OffloadName] = ()) -> list[Policy]:
    """List the ways that keep more than all that a policy keeps, the least first."""
    return [way for way in ways_beside(offload) if _kept(way) > _kept(policy)]


def _kept(policy: Policy) -> frozenset[str]:
    if not isinstance(policy, Remat):
        return frozenset(policy)
    return frozenset(
        {
            Remat.full: (),
            Remat.dots: (*_AROUND, *_MLP),
            Remat.none: (*INTERMEDIATES, _ALL),
        }[policy]
    )
