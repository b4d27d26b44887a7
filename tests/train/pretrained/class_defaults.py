"""Write the defaults of transformers' classes, which config.json need not repeat.

    python -m tests.train.pretrained.class_defaults

This needs transformers, and rewrites train/pretrained/class_defaults.json.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from train.pretrained import class_settings
from train.pretrained.families import FAMILIES

FILE = Path(class_settings.__file__).with_name("class_defaults.json")
# Settings that do not change a causal model's logits in float32.
WITHOUT_EFFECT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
    *("use_cache", "pretraining_tp", "reorder_and_upcast_attn"),
    # Training in transformers reads these.
    *("attention_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop"),
    *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
    # A classifier reads these.
    *("summary_type", "summary_use_proj", "summary_activation"),
    *("summary_proj_to_labels", "summary_first_dropout"),
}


def class_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of the classes of all families, by model type."""
    types = (name for f in FAMILIES for name in (f.name, *f.compatible_types))
    return {name: defaults for name in types if (defaults := _defaults_of(name))}


def _defaults_of(model_type: str) -> dict[str, Any] | None:
    """Return the defaults of one class, or None if it does not exist or is nested."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type].sub_configs:
        return None
    config_class = CONFIG_MAPPING[model_type]
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    ignored = shared | WITHOUT_EFFECT | {"rope_parameters"}
    fields = (x for x in dataclasses.fields(config_class) if x.name not in ignored)
    instance = config_class()
    return {
        "settings": {field.name: field.default for field in fields},
        "aliases": config_class.attribute_map,
        "rope": getattr(instance, "rope_parameters", None),
        "layer_types": _period(getattr(instance, "layer_types", None) or []),
    }


def _period(layer_types: list[str]) -> list[str]:
    """Return the shortest list whose repetition gives all kinds of layers."""
    lengths = range(1, len(layer_types) + 1)
    repeats = (n for n in lengths if layer_types[n:] == layer_types[:-n])
    return layer_types[: next(repeats, 0)]


if __name__ == "__main__":
    FILE.write_text(json.dumps(class_defaults(), indent=1) + "\n")
