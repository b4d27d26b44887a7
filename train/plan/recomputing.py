"""The rematerialisation policies that a plan compares.

Saving the result of a product takes 2 / (2 D) bytes in bfloat16 for each FLOP that is
not recomputed, where D is the contracted dim. Saving attention's result takes 2 / (2 T)
bytes for each FLOP in rows of T positions, and an attention kernel computes a FLOP more
slowly than a product does. So attention's result is saved first, then the results of
the query, key, value and output projections, and then the intermediates of the MLP,
which are the largest.
"""

from collections.abc import Sequence
from typing import cast

from model.choices import INTERMEDIATES, Intermediate, OffloadName
from model.config import ModelConfig
from train.config import Remat

RematPolicy = Remat | tuple[Intermediate, ...]

_QKVO: tuple[Intermediate, ...] = ("query", "key", "value", "attention_output")
_MLP: tuple[Intermediate, ...] = ("mlp_gate", "mlp_up")
_OTHERS = "intermediates other than products"
# Sorted from the policy that saves least to the one that saves most.
POLICIES: tuple[RematPolicy, ...] = (
    Remat.full,
    ("attention",),
    ("attention", *_QKVO),
    Remat.dots,
    ("attention", *_QKVO, *_MLP),
    Remat.none,
)


def policies_for(model: ModelConfig) -> list[RematPolicy]:
    """Return the policies that are distinct for a model, in the order of POLICIES."""
    no_mlp = model.expert_layers == model.num_layers and not model.shared_experts
    return [p for p in POLICIES if not (no_mlp and {*_MLP} <= {*p})]


def format_policy(policy: RematPolicy) -> str:
    """Return a policy in the syntax of overrides: `full`, or `[attention,query]`."""
    if isinstance(policy, Remat):
        return policy.value
    return f"[{','.join(policy)}]"


def parse_policy(text: str) -> RematPolicy:
    """Parse a policy that `format_policy` wrote."""
    if not text.startswith("["):
        return Remat(text)
    names = tuple(filter(None, text.strip("[]").split(",")))
    return cast(tuple[Intermediate, ...], names)


def policies_with_offload(offload: Sequence[OffloadName]) -> list[RematPolicy]:
    """Return the policies that save no offloaded result on the device.

    They have the order of POLICIES. `Remat.none` is left out if anything is offloaded.
    """
    return [p for p in POLICIES if not (offload and _saved(p) & {*offload, _OTHERS})]


def policies_keeping_less(
    policy: RematPolicy, offload: Sequence[OffloadName] = ()
) -> list[RematPolicy]:
    """Return the policies that save less than `policy`, from most to least saved."""
    candidates = reversed(policies_with_offload(offload))
    return [p for p in candidates if _saved(p) < _saved(policy)]


def policies_keeping_more(
    policy: RematPolicy, offload: Sequence[OffloadName] = ()
) -> list[RematPolicy]:
    """Return the policies that save more than `policy`, in the order of POLICIES."""
    return [p for p in policies_with_offload(offload) if _saved(p) > _saved(policy)]


def _saved(policy: RematPolicy) -> frozenset[str]:
    if not isinstance(policy, Remat):
        return frozenset(policy)
    return frozenset(
        {
            Remat.full: (),
            Remat.dots: (*_QKVO, *_MLP),
            Remat.none: (*INTERMEDIATES, _OTHERS),
        }[policy]
    )
