"""The kinds of blocks that there are: the only module that knows all of them."""

from flax import nnx

from model.choices import Mixer
from model.config import ModelConfig
from model.kinds import Kinds
from model.layers import MLP, SelfAttention
from model.parts.delta.layer import GatedDeltaNet
from model.parts.experts.experts import Experts
from model.parts.latent.attention import LatentAttention


def make_mlp(config: ModelConfig, rngs: nnx.Rngs) -> MLP:
    """Return the MLP of a layer without experts."""
    return MLP(config, config.mlp_size, rngs)


KINDS = Kinds(
    mixers={
        Mixer.attention: SelfAttention,
        Mixer.latent_attention: LatentAttention,
        Mixer.gated_delta: GatedDeltaNet,
    },
    mlps={False: make_mlp, True: Experts},
)
