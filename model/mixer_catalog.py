"""The records of all mixers, without JAX."""

from model.attention.kind import ATTENTION
from model.choices import Mixer
from model.mixer_kind import MixerKind
from model.parts.delta.kind import GATED_DELTA
from model.parts.latent.kind import LATENT_ATTENTION

MIXERS: dict[Mixer, MixerKind] = {
    Mixer.attention: ATTENTION,
    Mixer.latent_attention: LATENT_ATTENTION,
    Mixer.gated_delta: GATED_DELTA,
}
