"""Find the family of a folder of weights, and compare its config.json with a model.

A setting that config.json leaves out has the default of transformers' class.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import Mistake
from data.storage import check_regular
from model.config import ModelConfig
from train.errors import ConfigError, as_typed
from train.pretrained.class_settings import class_defaults, resolve, rope_of
from train.pretrained.families import FAMILIES
from train.pretrained.family import NOT_NULL, Family
from train.pretrained.folder_settings import (
    KEYS,
    NOT_COMPARED,
    OPTIONAL_WITHOUT_CLASS,
    PREDICTION_LAYERS,
    ROPE_KEYS,
    pattern_of,
)

_KEY = "init_from"
# Types whose config.json holds the settings of the text model in `text_config`.
_COMPOSITE = {"qwen3_5_moe": "qwen3_5_moe_text"}
# Settings with which transformers would build or read something else.
_NOT_SUPPORTED = "per_layer_config", "transformers_weights"
_HEAD = "tie_word_embeddings"
# What computing with settings of other types or sizes may raise.
_MALFORMED = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError)


class _Difference(NamedTuple):
    """A setting that differs, in the words of `model.*` if it has a key.

    is_stated: whether config.json states it.
    """

    ours: Any
    theirs: Any
    is_stated: bool = True


class _Settings(NamedTuple):
    """The settings of a folder.

    class_name: the model type of the class in transformers.
    stated: the settings that config.json states.
    resolved: all settings.
    rope: the rotary settings by kind of layer.
    """

    class_name: str
    stated: dict[str, Any]
    resolved: dict[str, Any]
    rope: dict[str, dict[str, Any]]


def settings_in(path: str) -> dict[str, Any]:
    """Return the content of a folder's config.json."""
    try:
        file = Path(path) / "config.json"
        check_regular(file)
        settings = json.loads(file.read_text())
        if not isinstance(settings, dict):
            raise ValueError("config.json does not hold an object")
    except (OSError, ValueError, RecursionError) as error:
        rule = f"must be a folder with config.json and weights, or a run's ({error})"
        raise ConfigError([Mistake(_KEY, path, rule)]) from None
    return settings


def class_of(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model type of the text model in a config.json, and its settings."""
    kind = str(settings.get("model_type"))
    if kind not in _COMPOSITE:
        return kind, dict(settings)
    return _COMPOSITE[kind], dict(settings.get("text_config") or {})


def resolved_settings(path: str, family: Family) -> dict[str, Any]:
    """Return the settings of a folder, with the defaults of its class.

    Raises:
        ConfigError: if transformers could not use the settings.
    """
    kind, stated = class_of(settings_in(path))
    return _read(path, stated, _class_name(kind, family)).resolved


def family_of_folder(path: str, model: ModelConfig) -> Family:
    """Return the family of a folder, and check that its settings agree with `model`.

    Raises:
        ConfigError: if settings differ. The message lists the overrides of `model.*`
            that adopt the folder's settings.
    """
    settings = settings_in(path)
    kind, stated = class_of(settings)
    candidates = [f for f in FAMILIES if kind in (f.name, *f.compatible_types)]
    if rule := _refusal(settings, stated, candidates):
        raise ConfigError([Mistake(_KEY, path, rule)])
    family = min(candidates, key=lambda family: len(family.unmet_needs(model)))
    differing = {
        f"model.{key}": _Difference(
            value, None if callable(family.needs[key]) else need
        )
        for key, (value, need) in family.unmet_needs(model).items()
    }
    theirs = _read(path, stated, _class_name(kind, family))
    for key, difference in _differing_settings(theirs, family, model):
        if key != "model.tied_head" or model.tied_head or not _has_head(path):
            differing[key] = difference
    rows = theirs.resolved.get("vocab_size") or 0
    if rows > (model.vocab_size or 0):
        is_stated = "vocab_size" in stated
        differing["model.vocab_size"] = _Difference(model.vocab_size, rows, is_stated)
    if not differing:
        return family
    for key, value in _values_of_null_keys(theirs.resolved, family, model):
        differing.setdefault(key, _Difference(None, value))
    rule = _differences_rule(str(settings.get("model_type")), differing, candidates)
    raise ConfigError([Mistake(_KEY, path, rule)])


def _class_name(kind: str, family: Family) -> str:
    return kind if kind in class_defaults() else family.name


def _refusal(
    settings: Mapping[str, Any], stated: Mapping[str, Any], candidates: list[Family]
) -> str | None:
    """Return why a folder cannot be read, or None."""
    kind = settings.get("model_type")
    quantization = settings.get("quantization_config")
    quantization = quantization or stated.get("quantization_config")
    if quantization:
        return (
            f"holds quantized weights ({quantization.get('quant_method')}), which "
            f"cannot be read; load it in transformers with dequantize=True in its "
            f"quantization_config, and start from the folder that save_pretrained "
            f"writes"
        )
    if not candidates:
        names = ", ".join(family.name for family in FAMILIES)
        return f"holds a model of type {kind}, which is none of {names}"
    for name in _NOT_SUPPORTED:
        if stated.get(name):
            return f"states {name} in config.json, which Longhaul cannot read"
    if stated.get("text_config"):
        return f"states text_config, which a model of type {kind} does not have"
    tied = settings.get(_HEAD)
    text_tied = stated.get(_HEAD)
    if None not in (tied, text_tied) and tied != text_tied:
        return f"states {_HEAD}={tied} in config.json and {text_tied} in text_config"
    if kind in {*class_defaults(), *_COMPOSITE}:
        return None
    # transformers has no class of this type.
    needed = {*class_defaults()[candidates[0].name].settings, "rope_theta"}
    needed -= {*NOT_COMPARED, *OPTIONAL_WITHOUT_CLASS, *PREDICTION_LAYERS}
    if "rope_theta" in (stated.get("rope_parameters") or {}):
        needed.discard("rope_theta")
    if unstated := sorted(needed - stated.keys()):
        return (
            f"holds a model of type {kind}, for which transformers has no class and so "
            f"no defaults; config.json must state {', '.join(unstated)}"
        )
    return None


def _read(path: str, stated: dict[str, Any], class_name: str) -> _Settings:
    """Return all settings of a folder, given those that config.json states."""
    try:
        values = resolve(stated, class_name)
        rope = rope_of(stated, values, class_name)
        return _Settings(class_name, stated, values, rope)
    except _MALFORMED as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        rule = f"has a config.json that transformers or Longhaul cannot use: {reason}"
        raise ConfigError([Mistake(_KEY, path, rule)]) from None


def _differing_settings(
    settings: _Settings, family: Family, model: ModelConfig
) -> Iterator[tuple[str, _Difference]]:
    """Yield each setting that differs by its key of `model.*`, or by its name."""
    class_name, stated, theirs, their_rope = settings
    our_stated = {"sliding_window": model.window, _HEAD: model.tied_head}
    our_stated |= family.settings(model)
    ours = resolve(our_stated, class_name)
    not_compared = NOT_COMPARED + PREDICTION_LAYERS * (not model.predict_ahead)
    keys = KEYS | family.keys
    for name, value in ours.items():
        is_rope = name.startswith("rope_") and name != "rope_interleave"
        if is_rope or name in not_compared or name not in theirs:
            continue
        # Other programs read settings that transformers' class does not have.
        is_known = name in class_defaults()[class_name].settings or name == "head_dim"
        if theirs[name] == value or (not is_known and theirs[name] is None):
            continue
        key = f"model.{keys[name]}" if name in keys else name
        pair = value, theirs[name]
        if name == "layer_types":
            pair = tuple(pattern_of(kinds, keys[name]) for kinds in pair)
            if pair[0] == pair[1]:  # only the number of layers differs
                continue
        yield key, _Difference(*pair, is_stated=name in stated)
    for layers, our_values in rope_of(our_stated, ours, class_name).items():
        their_values = their_rope[layers]
        rope_keys = ROPE_KEYS[layers]
        for name in our_values | their_values:
            pair = our_values.get(name), their_values.get(name)
            if not _equal(*pair):
                key = f"model.{rope_keys[name]}" if name in rope_keys else name
                our_value, value = ("none" if x == "default" else x for x in pair)
                yield key, _Difference(our_value, value)


def _equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal, but for rounding."""
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-12)
    return value == other


def _has_head(path: str) -> bool:
    """Return whether a folder has a tensor of the head."""
    try:
        from safetensors import safe_open
    except ImportError:
        return False
    index = Path(path) / "model.safetensors.index.json"
    weights = Path(path) / "model.safetensors"
    try:
        if index.exists():
            check_regular(index)
            return b'"lm_head.weight"' in index.read_bytes()
        check_regular(weights)
        with safe_open(weights, "numpy") as file:
            return "lm_head.weight" in file.keys()  # noqa: SIM118
    except Exception:  # the tensors' check says what is wrong
        return False


def _values_of_null_keys(
    theirs: Mapping[str, Any], family: Family, model: ModelConfig
) -> Iterator[tuple[str, Any]]:
    """Yield the folder's values of keys that are null in the model."""
    our_settings = family.settings(model)
    for name, key in (KEYS | family.keys).items():
        value = theirs.get(name) if name in our_settings else None
        if value is not None and getattr(model, key) is None:
            if name == "layer_types":
                value = pattern_of(value, key)
            yield f"model.{key}", value


def _differences_rule(
    kind: str, differing: Mapping[str, _Difference], candidates: Sequence[Family]
) -> str:
    """Return a rule that lists all differences, and what to type.

    `candidates` are the families of the folder's model type.
    """
    rule = f"holds a model of type {kind}, and model.* makes another:"
    overrides = []
    for key, (ours, theirs, is_stated) in differing.items():
        is_any = theirs is NOT_NULL
        rule += f"\n  {key} is {as_typed(ours)}, there "
        rule += "set" if is_any else as_typed(theirs)
        if not is_stated:
            rule += " (the default in transformers, because config.json leaves it out)"
        if not any(_can_have(family, key, theirs) for family in candidates):
            rule += ", which Longhaul does not have in this family"
        elif key.startswith("model.") and not is_any:
            overrides.append(f"{key}={as_typed(theirs)}")
    if overrides:
        rule += f"\nto take its settings type {shlex.join(overrides)}"
    return rule


def _can_have(family: Family, key: str, value: Any) -> bool:
    """Return whether models of a family can have the value of a setting."""
    if not key.startswith("model."):
        return False
    field = key.removeprefix("model.")
    need = family.needs.get(field, value)
    return callable(need) or need is NOT_NULL or need == value
