"""The records of all mixers, by their names, without JAX."""

from model.attention.kind import ATTENTION
from model.mixer_kind import MixerKind
from model.parts.delta.kind import GATED_DELTA
from model.parts.latent.kind import LATENT_ATTENTION

_KINDS = (
    ATTENTION,
    LATENT_ATTENTION,
    GATED_DELTA,
)
MIXERS: dict[str, MixerKind] = {kind.name: kind for kind in _KINDS}
