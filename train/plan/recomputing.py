"""The rematerialisation policies that a plan compares.

Attention's result is saved first, because it is small for its time. Next come latents,
if the model has latent attention, the query, key, value and output projections, and
then the MLP's large intermediates.
"""

from typing import Any

from model.choices import INTERMEDIATES, Intermediate
from model.config import ModelConfig
from train.config import Remat, TrainConfig

RematPolicy = Remat | tuple[Intermediate, ...]

_QKVO: tuple[Intermediate, ...] = ("query", "key", "value", "attention_output")
_MLP: tuple[Intermediate, ...] = ("mlp_gate", "mlp_up")
# Sorted from the policy that saves least to the one that saves most.
POLICIES: tuple[RematPolicy, ...] = (
    Remat.full,
    ("attention",),
    ("attention", "latent"),
    ("attention", *_QKVO),
    Remat.dots,
    ("attention", *_QKVO, *_MLP),
    Remat.none,
)
_OTHERS = "intermediates other than products"
_SAVED: dict[RematPolicy, tuple[str, ...]] = {
    Remat.full: (),
    Remat.dots: (*_QKVO, "latent", *_MLP),
    Remat.none: (*INTERMEDIATES, _OTHERS),
}


def format_policy(policy: RematPolicy) -> str:
    """Return a policy in the syntax of overrides: `full`, or `[attention,query]`."""
    return policy.value if isinstance(policy, Remat) else f"[{','.join(policy)}]"


def parse_policy(text: str) -> RematPolicy:
    """Parse a policy that `format_policy` wrote."""
    names: Any = filter(None, text.strip("[]").split(","))
    return tuple(names) if text.startswith("[") else Remat(text)


def policies_for(model: ModelConfig, train: TrainConfig) -> list[RematPolicy]:
    """Return the policies that are distinct for a model, in the order of POLICIES."""
    no_mlp = model.expert_layers == model.num_layers and not model.shared_experts
    return [p for p in _allowed(model, train) if not (no_mlp and {*_MLP} <= {*p})]


def policies_keeping_less(model: ModelConfig, train: TrainConfig) -> list[RematPolicy]:
    """Return the policies that save less than a config's, from most to least saved."""
    saved = _saved(train.remat, model)
    return [p for p in reversed(_allowed(model, train)) if _saved(p, model) < saved]


def policies_keeping_more(model: ModelConfig, train: TrainConfig) -> list[RematPolicy]:
    """Return the policies that save more than a config's, in the order of POLICIES."""
    saved = _saved(train.remat, model)
    return [p for p in _allowed(model, train) if _saved(p, model) > saved]


def _allowed(model: ModelConfig, train: TrainConfig) -> list[RematPolicy]:
    """Return the policies that save no offloaded result on the device.

    Policies that name results which the model lacks are left out.
    """
    offload = train.offload
    names = {*offload, _OTHERS} if offload else set()
    return [
        p
        for p in POLICIES
        if not _saved(p, model) & names
        and (isinstance(p, Remat) or {*p} == _saved(p, model))
    ]


def _saved(policy: RematPolicy, model: ModelConfig) -> frozenset[str]:
    lacking = set() if model.has_latent_attention else {"latent"}
    return frozenset(_SAVED.get(policy, policy)) - lacking
