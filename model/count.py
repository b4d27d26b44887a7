"""Count the parameters of a model."""

import jax

from model.config import ModelConfig
from model.gpt import GPT, params_of
from model.params import ParamInfo, is_info, param_infos


def num_params(model: GPT) -> int:
    """Count the parameters, without padding. The model may be abstract."""
    return sum(info.size(shape) for info, shape in _infos_and_shapes(model))


def num_active_params(model: GPT) -> int:
    """Count the parameters that one token uses: of experts, only those it chooses."""
    config = model.config
    sizes = ((info, info.size(shape)) for info, shape in _infos_and_shapes(model))
    experts = config.num_experts
    return sum(size * active_parts(info, config) // experts for info, size in sizes)


def active_parts(info: ParamInfo, config: ModelConfig) -> int:
    """Return n such that a token uses n / num_experts of a parameter."""
    has_experts = info.stack_dims > info.stacked
    return config.experts_per_token if has_experts else config.num_experts


def _infos_and_shapes(model: GPT) -> list[tuple[ParamInfo, tuple[int, ...]]]:
    infos = jax.tree.leaves(param_infos(model), is_leaf=is_info)
    params = jax.tree.leaves(params_of(model))
    return [(i, p.shape) for i, p in zip(infos, params, strict=True)]
