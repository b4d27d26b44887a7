"""The rematerialisation policies that a plan compares.

Attention's result is saved first, because it is small for its time. Next come the
query, key, value and output projections, and then the MLP's large intermediates.
"""

from typing import Any

from model.choices import INTERMEDIATES, Intermediate
from train.config import Config, Remat, TrainConfig

RematPolicy = Remat | tuple[Intermediate, ...]

_QKVO: tuple[Intermediate, ...] = ("query", "key", "value", "attention_output")
_MLP: tuple[Intermediate, ...] = ("mlp_gate", "mlp_up")
# Sorted from the policy that saves least to the one that saves most.
POLICIES: tuple[RematPolicy, ...] = (
    Remat.full,
    ("attention",),
    ("attention", *_QKVO),
    Remat.dots,
    ("attention", *_QKVO, *_MLP),
    Remat.none,
)
_OTHERS = "intermediates other than products"
_SAVED: dict[RematPolicy, tuple[str, ...]] = {
    Remat.full: (),
    Remat.dots: (*_QKVO, *_MLP),
    Remat.none: (*INTERMEDIATES, _OTHERS),
}


def format_policy(policy: RematPolicy) -> str:
    """Return a policy in the syntax of overrides: `full`, or `[attention,query]`."""
    return policy.value if isinstance(policy, Remat) else f"[{','.join(policy)}]"


def parse_policy(text: str) -> RematPolicy:
    """Parse a policy that `format_policy` wrote."""
    names: Any = filter(None, text.strip("[]").split(","))
    return tuple(names) if text.startswith("[") else Remat(text)


def policies_for(config: Config) -> list[RematPolicy]:
    """Return the policies that are distinct for a model, in the order of POLICIES."""
    model = config.model
    no_mlp = model.expert_layers == model.num_layers and not model.shared_experts
    return [p for p in _allowed(config.train) if not (no_mlp and {*_MLP} <= {*p})]


def policies_keeping_less(train: TrainConfig) -> list[RematPolicy]:
    """Return the policies that save less than a config's, from most to least saved."""
    return [p for p in reversed(_allowed(train)) if _saved(p) < _saved(train.remat)]


def policies_keeping_more(train: TrainConfig) -> list[RematPolicy]:
    """Return the policies that save more than a config's, in the order of POLICIES."""
    return [p for p in _allowed(train) if _saved(p) > _saved(train.remat)]


def _allowed(train: TrainConfig) -> list[RematPolicy]:
    """Return the policies that save no offloaded result on the device."""
    names = {*train.offload, _OTHERS} if train.offload else set()
    return [p for p in POLICIES if not _saved(p) & names]


def _saved(policy: RematPolicy) -> frozenset[str]:
    return frozenset(_SAVED.get(policy, policy))
