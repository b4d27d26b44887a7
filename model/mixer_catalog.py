"""The records of all mixers, by their names, without JAX."""

from collections.abc import Mapping

from model.attention.kind import ATTENTION
from model.config import ModelConfig
from model.mixer_kind import MixerKind
from model.mlp_kind import MLPKind, mlps_of
from model.parts.delta.kind import GATED_DELTA
from model.parts.latent.kind import LATENT_ATTENTION

_KINDS = (
    ATTENTION,
    LATENT_ATTENTION,
    GATED_DELTA,
)
MIXERS: dict[str, MixerKind] = {kind.name: kind for kind in _KINDS}


def kinds_of(config: ModelConfig) -> Mapping[str, MixerKind]:
    """Return the mixers that a config may name, with those that users have added."""
    return getattr(type(config), "kinds", MIXERS)


def sized_kinds(config: ModelConfig) -> list[MixerKind | MLPKind]:
    """Return the records whose keys may be sizes: of mixers, and of added MLPs."""
    return [*kinds_of(config).values(), *mlps_of(config).values()]
