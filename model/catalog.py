"""The parts of models, and the kernels and methods that run them, as values."""

from typing import Any

from flax import nnx

from model.config import ModelConfig
from model.execution_parts import ExecutionParts
from model.layers import MLP
from model.mixer_catalog import MIXERS, kinds_of
from model.mlp_kind import mlps_of
from model.model_parts import ModelParts
from model.parts.attention import KernelAttention, choose_kernel
from model.parts.context.context_parallel import choose_context_attention
from model.parts.eight_bits.recipes import RECIPES
from model.parts.experts.experts import Experts
from model.parts.experts.grouped import choose_grouped
from model.parts.kernels.norm_triton import choose_norm
from model.parts.pipeline import CircularPipeline
from model.parts.predict_ahead import PredictionModules
from model.parts.token_shift import shift_channels


def make_mlp(config: ModelConfig, rngs: nnx.Rngs) -> Any:
    """Return the MLP of a block without experts."""
    if (kind := mlps_of(config).get(config.mlp)) is not None:
        return kind.make(config, rngs)
    return MLP(config, config.mlp_size, rngs)


MODEL_PARTS = ModelParts(
    mixers=MIXERS,
    mlp=make_mlp,
    experts=Experts,
    shift=shift_channels,
    prediction_modules=PredictionModules,
)


def parts_of(config: ModelConfig) -> ModelParts:
    """Return the parts of a model, with those that users have added."""
    return MODEL_PARTS._replace(mixers=kinds_of(config))


EXECUTION_PARTS = ExecutionParts(
    choose_kernel=choose_kernel,
    choose_context_attention=choose_context_attention,
    make_attention=KernelAttention,
    choose_grouped=choose_grouped,
    choose_norm=choose_norm,
    quantizations=RECIPES,
    make_pipeline=CircularPipeline,
)
