"""The settings that transformers uses for a config.json, which need not state them all.

Source: transformers 5.24, configuration_utils.py, modeling_rope_utils.py and
models/*/configuration_*.py. class_defaults.json holds the defaults of each class;
tests/train/pretrained/class_defaults.py writes it.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model.choices import Scaling

# The setting for the number of layers in each period of `layer_types`.
_PERIODS = {
    "gemma3_text": "sliding_window_pattern",
    "qwen3_next": "full_attention_interval",
    "qwen3_5_moe_text": "full_attention_interval",
}
# The setting for the rotations of local layers, in older files.
_LOCAL_THETAS = {"gemma3_text": "rope_local_base_freq"}
_LAYERS = "full_attention", "sliding_attention"
_MAX_LAYERS = 100_000


class ClassDefaults(NamedTuple):
    """The defaults of a class of transformers.

    settings: the default of each setting that changes what a model computes.
    aliases: other names of settings.
    rope: the rotary settings of a config.json that says nothing about them, which may
        be divided by kind of layer.
    layer_types: the kinds of layers that are repeated over the depth.
    """

    settings: dict[str, Any]
    aliases: dict[str, str]
    rope: dict[str, Any] | None
    layer_types: list[str]

    @property
    def rope_by_layer(self) -> bool:
        """Whether each kind of layer has rotary settings of its own."""
        return any(layers in (self.rope or {}) for layers in _LAYERS)


@functools.cache
def class_defaults() -> dict[str, ClassDefaults]:
    """Return the defaults of each class, by model type."""
    text = Path(__file__).with_name("class_defaults.json").read_text()
    return {name: ClassDefaults(**entry) for name, entry in json.loads(text).items()}


def resolve(stated: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return all settings of a model, given those that a config.json states.

    Settings that follow from others are computed, and settings that have no effect on
    this model are None. The result does not hold rotary settings; see `rope_of`.

    Raises:
        ValueError: if the settings contradict each other.
    """
    defaults = class_defaults()[model_type]
    values = defaults.settings | dict(stated)
    for alias, name in defaults.aliases.items():
        # transformers sets the names that its class does not declare last.
        is_declared = alias in defaults.settings
        first, last = (alias, name) if is_declared else (name, alias)
        values[first] = values[last] = stated.get(last, values.get(first))
    _resolve_attention(values, stated, defaults)
    if "layer_types" in defaults.settings:
        values["layer_types"] = _layer_types(values, model_type)
    _resolve_window(values, defaults)
    if "decoder_sparse_step" in defaults.settings:
        values["mlp_only_layers"] = values.get("mlp_only_layers") or []
        if values["decoder_sparse_step"] == 1 and not values["mlp_only_layers"]:
            values["intermediate_size"] = None  # the dim of layers without experts
    if "n_inner" in defaults.settings and values["n_inner"] is None:
        values["n_inner"] = 4 * values["n_embd"]
    if "topk_method" in defaults.settings and values["topk_method"] == "greedy":
        values["n_group"] = values["topk_group"] = 1  # greedy does not use groups
    for name in ("use_bidirectional_attention", "rope_interleave"):
        if name in values:
            values[name] = bool(values[name])
    return values


def _resolve_attention(
    values: dict[str, Any], stated: Mapping[str, Any], defaults: ClassDefaults
) -> None:
    """Set the numbers of heads and dims that follow from others."""
    num_heads = values["num_attention_heads"]
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = num_heads
    if "qk_rope_head_dim" in defaults.settings:
        if "head_dim" in defaults.settings or "head_dim" not in stated:
            values["head_dim"] = values["qk_rope_head_dim"]
    elif values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // num_heads


def _layer_types(values: Mapping[str, Any], model_type: str) -> list[str]:
    """Return the kind of each layer."""
    num_layers = values["num_hidden_layers"]
    stated = values["layer_types"]
    if num_layers > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {num_layers}, above {_MAX_LAYERS}")
    if stated is not None:
        if len(stated) != num_layers:
            raise ValueError(
                f"layer_types has {len(stated)} entries, and num_hidden_layers is "
                f"{num_layers}"
            )
        return ["full_attention" if x == "attention" else x for x in stated]
    period = class_defaults()[model_type].layer_types
    if values.get("use_sliding_window") and values["sliding_window"] is not None:
        first_window = values["max_window_layers"]
        return [_LAYERS[layer >= first_window] for layer in range(num_layers)]
    length = values.get(_PERIODS.get(model_type, ""), len(period))
    return [
        period[0] if number % length else period[-1]
        for number in range(1, num_layers + 1)
    ]


def _resolve_window(values: dict[str, Any], defaults: ClassDefaults) -> None:
    """Set the window to None if no layer has it."""
    if "use_sliding_window" in defaults.settings:
        if not values["use_sliding_window"]:
            values["sliding_window"] = None
        values["use_sliding_window"] = values["max_window_layers"] = None
    kinds = values["layer_types"] if "layer_types" in defaults.settings else ()
    if kinds and "sliding_attention" not in kinds:
        values["sliding_window"] = None


def rope_of(
    stated: Mapping[str, Any], values: Mapping[str, Any], model_type: str
) -> dict[str, dict[str, Any]]:
    """Return the rotary settings by kind of layer, with all defaults.

    Args:
        stated: the settings in config.json, of versions 4 or 5 of transformers.
        values: the result of `resolve`.
        model_type: the class.

    Raises:
        ValueError: if transformers could not use the settings, or Longhaul has no such
            rotations.
    """
    defaults = class_defaults()[model_type]
    if defaults.rope is None:
        return {}
    if not defaults.rope_by_layer:
        rope = _flat_rope(stated, defaults.rope)
        if "original_max_position_embeddings" in stated:
            name = "original_max_position_embeddings"
            rope[name] = stated[name]
        return {"full_attention": _normalized(rope, values)}
    by_layer = {
        layers: _layer_rope(layers, stated, defaults.rope, model_type)
        for layers in _LAYERS
    }
    # transformers 5.24 does not read `truncate` here.
    return {k: _normalized(v | {"truncate": True}, values) for k, v in by_layer.items()}


def _flat_rope(stated: Mapping[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a class that has the same for all layers."""
    theta = stated.get("rope_theta", default["rope_theta"])
    fraction = stated.get("partial_rotary_factor", default.get("partial_rotary_factor"))
    parameters = stated.get("rope_scaling") or stated.get("rope_parameters")
    if parameters is None:
        parameters = {k: v for k, v in default.items() if k not in _OWN_KEYS}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError("its rotary settings are divided by kind of layer")
    fraction = 1.0 if fraction is None else fraction
    return {"rope_theta": theta, "partial_rotary_factor": fraction} | parameters


# Rotary settings that older files state beside `rope_scaling`.
_OWN_KEYS = "rope_theta", "partial_rotary_factor"


def _layer_rope(
    layers: str, stated: Mapping[str, Any], default: dict[str, Any], model_type: str
) -> dict[str, Any]:
    """Return the rotary settings of one kind of layer."""
    parameters = stated.get("rope_parameters")
    scaling = stated.get("rope_scaling")
    if parameters is None:
        parameters = {kind: {"rope_type": "default"} for kind in _LAYERS}
    if any(not isinstance(x, dict | None) for x in parameters.values()):
        raise ValueError(
            f"rope_parameters must hold settings of {' and '.join(_LAYERS)}"
        )
    if scaling and "full_attention" not in parameters:
        raise ValueError(
            "rope_parameters lacks full_attention, and rope_scaling is set"
        )
    is_global = layers == "full_attention"
    rope = dict(parameters.get(layers) or {})
    if is_global and scaling:
        rope |= scaling
    key = "rope_theta" if is_global else _LOCAL_THETAS.get(model_type, "")
    theta = stated.get(key, default[layers]["rope_theta"])
    fraction = stated.get("partial_rotary_factor") or 1.0
    return {"rope_theta": theta, "partial_rotary_factor": fraction} | rope


def _normalized(rope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings that have an effect, with their defaults."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = {str(x): x for x in Scaling} | {"default": Scaling.none}
    if kind not in kinds:
        raise ValueError(f"rope_type is {kind}, which Longhaul does not have")
    scaling = kinds[kind]
    result = {"rope_type": kind} | {key: rope[key] for key in _OWN_KEYS}
    if scaling is Scaling.none:
        return result
    length = "original_max_position_embeddings"
    original = rope.get(length, values["max_position_embeddings"])
    needed = {Scaling.llama3: ("low_freq_factor", "high_freq_factor")}
    for key in ("factor", *needed.get(scaling, ())):
        if key not in rope:
            raise ValueError(f"its rotary settings of type {kind} lack {key}")
        result[key] = rope[key]
    if scaling in (Scaling.llama3, Scaling.yarn):
        result[length] = original
    if scaling is Scaling.yarn:
        if result["factor"] is None:
            result["factor"] = values["max_position_embeddings"] / original
        result["beta_fast"] = rope.get("beta_fast") or 32
        result["beta_slow"] = rope.get("beta_slow") or 1
        result["truncate"] = bool(rope.get("truncate", True))
        result["attention_factor"] = _attention_factor(rope, result["factor"])
    if "qk_rope_head_dim" in values:
        result["mscale_all_dim"] = rope.get("mscale_all_dim") or 0.0
    return result


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor by which yarn multiplies cosines and sines."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    mscale = rope.get("mscale")
    mscale_all_dim = rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
