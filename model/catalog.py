"""The parts of which models are made. A model takes them as a value."""

from flax import nnx

from model.choices import Mixer
from model.config import ModelConfig
from model.layers import MLP, SelfAttention
from model.model_parts import ModelParts
from model.parts.delta.layer import GatedDeltaNet
from model.parts.experts.experts import Experts
from model.parts.latent.attention import LatentAttention
from model.parts.predict_ahead import PredictionModules
from model.parts.token_shift import shift_channels


def make_mlp(config: ModelConfig, rngs: nnx.Rngs) -> MLP:
    """Return the MLP of a block without experts."""
    return MLP(config, config.mlp_size, rngs)


MODEL_PARTS = ModelParts(
    mixers={
        Mixer.attention: SelfAttention,
        Mixer.latent_attention: LatentAttention,
        Mixer.gated_delta: GatedDeltaNet,
    },
    mlp=make_mlp,
    experts=Experts,
    shift=shift_channels,
    prediction_modules=PredictionModules,
)
