"""The ways to recompute a layer that a plan weighs, and how to type them.

Bytes kept for each FLOP saved are alike for every product of a layer: in bfloat16
2 / (2 D), D being what it sums over. Attention's output costs 2 / (2 T) by T positions,
and a FLOP of its kernel takes longer than one of a product. So it is kept first, then
what lies around it, and last what the MLP makes, which is the most.
"""

from model.config import Intermediate
from train.config import Remat

Policy = Remat | tuple[Intermediate, ...]

_AROUND = ("query", "key", "value", "attention_output")
_MLP = ("mlp_gate", "mlp_up")


def _keep(*names: str) -> tuple[Intermediate, ...]:
    return tuple(map(Intermediate, names))


# The least is kept by the first, the most by the last.
WAYS: tuple[Policy, ...] = (
    Remat.full,
    _keep("attention"),
    _keep("attention", *_AROUND),
    Remat.dots,
    _keep("attention", *_AROUND, *_MLP),
    Remat.none,
)


def typed(policy: Policy) -> str:
    """Return what to type for a policy: `full`, or `[attention,query]`."""
    if isinstance(policy, Remat):
        return policy.value
    return f"[{','.join(name.value for name in policy)}]"


def parsed(text: str) -> Policy:
    """Return the policy that `typed` wrote."""
    if not text.startswith("["):
        return Remat(text)
    return _keep(*filter(None, text.strip("[]").split(",")))


def keeping_less(policy: Policy) -> list[Policy]:
    """List the ways that keep a part of what a policy keeps, the most first."""
    return [way for way in reversed(WAYS) if _kept(way) < _kept(policy)]


def keeping_more(policy: Policy) -> list[Policy]:
    """List the ways that keep more than all that a policy keeps, the least first."""
    return [way for way in WAYS if _kept(way) > _kept(policy)]


def _kept(policy: Policy) -> frozenset[str]:
    if not isinstance(policy, Remat):
        return frozenset(policy)
    elementwise = {"all that is no product"}
    return frozenset(
        {
            Remat.full: (),
            Remat.dots: (*_AROUND, *_MLP),
            Remat.none: (*Intermediate, *elementwise),
        }[policy]
    )
