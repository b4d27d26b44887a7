"""Open a folder of weights and compare it with a model.

The folder comes from transformers or `train.export`. Settings, tensor names and shapes
are compared before weights are read.
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.names import checked_name
from data.storage import check_regular
from model.choices import Position
from model.config import ModelConfig
from model.params import named
from train.errors import ConfigError, Mistake, as_typed
from train.pretrained.families import FAMILIES
from train.pretrained.family import NOT_NULL, Family
from train.pretrained.folder_settings import (
    KEYS,
    NOT_COMPARED,
    NULL_IS_NONE,
    PREDICTION_LAYERS,
    ROPE_KEYS,
    pattern_of,
    rope_of,
    with_layer_types,
)
from train.pretrained.fused import Part, parts_of_experts
from train.pretrained.tensors import FamilyTensors
from train.program import Program

_KEY = "init_from"
_INDEX = "model.safetensors.index.json"
_COMPARED_ROWS = 4096  # The number of rows that are compared at once.
_REMEDY = "Fetch or export the folder again"
# Older files also contain masks and rotary frequencies, which are ignored.
_IGNORED_TENSORS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# The encoder of images in a published model, whose text model has a prefix.
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_ENCODER = "model.visual."
_TEXT_PREFIX = "model.language_model."


class Folder:
    """An opened folder of weights: its settings, and its tensors' shapes by name.

    Closing `stack` closes the files.

    Raises:
        ConfigError: if the folder has no readable config.json.
        DataError: with the name of a missing or damaged file.
    """

    def __init__(self, path: str, family: Family, stack: ExitStack):
        """Open all files."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            rule = 'needs the package safetensors; pip install -e ".[export]"'
            raise ConfigError([Mistake(_KEY, path, rule)]) from None
        folder = Path(path)
        self.settings = _settings_in(path)
        file_of, files = _read_index(folder)
        self.shapes, self._files = dict[str, tuple[int, ...]](), dict[str, Any]()
        stored_names = set[str]()
        prefix = family.embedding_tensor.split(".")[0] + "."
        for file in files:
            try:
                check_regular(folder / file)
                opened = stack.enter_context(safe_open(folder / file, "numpy"))
            except (OSError, SafetensorError) as error:
                raise _unreadable(folder / file, error) from error
            stored_names |= {*opened.keys()}
            for name in opened.keys():  # noqa: SIM118, a safetensors file is not iterable
                if name.startswith(_ENCODER):
                    continue
                # GPT-2's files on the hub lack the prefix.
                has_prefix = name.startswith((prefix, "lm_head", "mtp."))
                full_name = name if has_prefix else prefix + name
                full_name = full_name.replace(_TEXT_PREFIX, prefix)
                if not full_name.endswith(_IGNORED_TENSORS):
                    shape = tuple(opened.get_slice(name).get_shape())
                    parts = {full_name: Part(shape)}
                    if family.has_single_experts:
                        parts = parts_of_experts(full_name, shape) or parts
                    for part_name, part in parts.items():
                        self.shapes[part_name] = part.shape
                        self._files[part_name] = opened, name, file, part
        if missing_names := {*file_of} - stored_names:
            missing = min(missing_names)
            file, rule = folder / file_of[missing], f"which {_INDEX} says it holds"
            raise DataError(f"{file}: lacks {missing}, {rule}. {_REMEDY}")

    def read(self, name: str, slices: Sequence[slice]) -> np.ndarray:
        """Return the part of a tensor that one slice for each dim selects."""
        file, stored_name, _, part = self._files[name]
        x = file.get_slice(stored_name)[part.select(slices)]
        return x if part.expert is None else x[0]

    def equal(self, name: str, other_name: str) -> bool:
        """Return whether two tensors of one shape have the same values."""
        rows = self.shapes[name][0]
        starts = range(0, rows, _COMPARED_ROWS)
        spans = (slice(start, min(start + _COMPARED_ROWS, rows)) for start in starts)
        return all(
            np.array_equal(self.read(name, [span]), self.read(other_name, [span]))
            for span in spans
        )

    def file(self, name: str) -> str:
        """Return the name of the file that contains a tensor."""
        return self._files[name][2]

    @property
    def digest(self) -> str:
        """The hash of settings, names and shapes."""
        description = [self.settings, sorted(self.shapes.items())]
        text = json.dumps(description, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files from which a folder's weights are read.

    Raises:
        DataError: if the index is damaged.
    """
    file_of, files = _read_index(folder)
    return ["config.json", *([_INDEX] if file_of else []), *files]


def _read_index(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the file of each tensor (empty without an index), and all files."""
    index = folder / _INDEX
    if not index.exists():
        return {}, ["model.safetensors"]
    try:
        check_regular(index)
        file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return file_of, sorted({*map(checked_name, file_of.values())})
    except _MALFORMED as error:
        raise _unreadable(index, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"{file}: cannot be read ({error}). {_REMEDY}")


def check_folder(path: str, program: Program) -> dict[str, str]:
    """Compare a folder with a model; return values that all processes must agree on.

    Raises:
        ConfigError: with every difference.
        DataError: with the name of a missing or damaged file.
    """
    family = family_of_folder(path, program.config.model)
    with ExitStack() as stack:
        folder = Folder(path, family, stack)
        tensors = tensors_of_folder(folder, family, program)
        if rules := [*_tensor_differences(folder, tensors, program)]:
            raise ConfigError([Mistake(_KEY, path, rule) for rule in rules])
        return {"weights to start from": folder.digest}


def tensors_of_folder(
    folder: Folder, family: Family, program: Program
) -> FamilyTensors:
    """Return the tensors of the program's model with the folder's vocabulary size."""
    vocab_size = folder.shapes.get(family.embedding_tensor, (0,))[0]
    return FamilyTensors(family, program.config.model, program.infos, vocab_size)


def modules_not_read(folder: Folder, model: ModelConfig) -> set[str]:
    """Return the tensors of prediction modules if the model has no modules."""
    count = max(folder.settings.get(key) or 0 for key in PREDICTION_LAYERS)
    layers = range(model.num_layers, model.num_layers + count)
    prefixes = *(f"model.layers.{layer}." for layer in layers), "mtp."
    names = {name for name in folder.shapes if name.startswith(prefixes)}
    return set() if model.predict_ahead else names


def _settings_in(path: str) -> dict[str, Any]:
    """Return the content of a folder's config.json."""
    try:
        file = Path(path) / "config.json"
        check_regular(file)
        settings = json.loads(file.read_text())
        if not isinstance(settings, dict):
            raise ValueError("config.json does not hold names and values")
        return settings
    except (OSError, ValueError, RecursionError) as error:
        rule = f"must be a folder with config.json and weights, or a run's ({error})"
        raise ConfigError([Mistake(_KEY, path, rule)]) from None


def family_of_folder(path: str, model: ModelConfig) -> Family:
    """Return the family of a folder, and check that its settings agree with `model`.

    Raises:
        ConfigError: if settings differ. The message lists the overrides of `model.*`
            that adopt the folder's settings.
    """
    theirs = _settings_in(path)
    kind, quantization = theirs.get("model_type"), theirs.get("quantization_config")
    candidates = [f for f in FAMILIES if kind in (f.name, *f.compatible_types)]
    if quantization:
        rule = f"holds quantized weights ({quantization.get('quant_method')}), which "
        rule += "cannot be read; load it in transformers with dequantize=True in its "
        rule += "quantization_config, and start from the folder that save_pretrained "
        rule += "writes"
    elif not candidates:
        rule = f"holds a model of type {kind}, which is none of "
        rule += ", ".join(family.name for family in FAMILIES)
    else:
        family = min(candidates, key=lambda family: len(family.unmet_needs(model)))
        theirs = theirs | theirs.get("text_config", {})
        differing = {
            f"model.{key}": (value, None if callable(family.needs[key]) else need)
            for key, (value, need) in family.unmet_needs(model).items()
        }
        differing |= _differing_settings(theirs, family, model)
        if theirs.get("vocab_size", 0) > (model.vocab_size or 0):
            differing["model.vocab_size"] = model.vocab_size, theirs["vocab_size"]
        if not differing:
            return family
        our_settings, keys = family.settings(model), KEYS | family.keys
        for name, key in keys.items():  # set null keys to the folder's values
            their_value = theirs.get(name) if name in our_settings else None
            if their_value is not None and getattr(model, key) is None:
                if name == "layer_types":
                    their_value = pattern_of(their_value, key)
                differing.setdefault(f"model.{key}", (None, their_value))
        rule = f"holds a model of type {kind}, and model.* makes another:"
        for key, (our_value, their_value) in differing.items():
            their_value = "set" if their_value is NOT_NULL else as_typed(their_value)
            rule += f"\n  {key} is {as_typed(our_value)}, there {their_value}"
        overrides = [
            f"{key}={as_typed(their_value)}"
            for key, (_, their_value) in differing.items()
            if key.startswith("model.") and their_value is not NOT_NULL
        ]
        if overrides:
            rule += f"\nto take its settings type {shlex.join(overrides)}"
    raise ConfigError([Mistake(_KEY, path, rule)])


def _differing_settings(
    theirs: dict[str, Any], family: Family, model: ModelConfig
) -> dict[str, tuple[Any, Any]]:
    """Return (model's value, config.json's value) for each setting that differs.

    The keys of the dict are keys of `model.*`, or names of settings without a key.
    """
    ours = {"sliding_window": model.window, "tie_word_embeddings": model.tied_head}
    ours |= family.settings(model)
    theirs = with_layer_types(theirs, model.num_layers)
    if not theirs.get("use_sliding_window", True):
        theirs = {**theirs, "sliding_window": None}
    not_compared = NOT_COMPARED + PREDICTION_LAYERS * (not model.predict_ahead)
    plain_settings = {
        k: v for k, v in ours.items() if k[:5] != "rope_" and k not in not_compared
    }
    groups = [(plain_settings, theirs, KEYS | family.keys)]
    if family.needs["position"] is Position.rotary:
        their_rope, our_rope = rope_of(theirs), rope_of(ours)
        for layers, keys in ROPE_KEYS.items():
            our_values = our_rope.get(layers, {})
            their_values = their_rope.get(layers, {})
            if our_values.get("rope_type") != their_values.get("rope_type"):
                unset = dict.fromkeys(keys.keys() & their_values.keys())
                our_values = unset | our_values
            groups.append((our_values, their_values, keys))
    differing = dict[str, tuple[Any, Any]]()
    for our_values, their_values, keys in groups:
        for name, value in our_values.items():
            their_value = their_values.get(name)
            means_none = name in their_values and name in NULL_IS_NONE
            if (their_value is not None or means_none) and their_value != value:
                key = f"model.{keys[name]}" if name in keys else name
                if name == "layer_types" and their_value is not None:
                    layers = value, their_value
                    value, their_value = (pattern_of(x, keys[name]) for x in layers)
                pair = ("none" if x == "default" else x for x in (value, their_value))
                differing[key] = next(pair), next(pair)
    return differing


def _tensor_differences(
    folder: Folder, tensors: FamilyTensors, program: Program
) -> Iterator[str]:
    """Yield a phrase for each tensor that differs or that folder or model lacks."""
    model = program.config.model
    if tensors.vocab_size > (model.vocab_size or 0):
        num_tokens = tensors.vocab_size
        file = folder.file(tensors.family.embedding_tensor)
        rule = f"has {num_tokens} tokens, model.vocab_size is {model.vocab_size}; "
        yield f"{rule}set model.vocab_size={num_tokens} ({file})"
        return
    ours = tensors.shapes(dict(named(program.state.params)))
    ignored, copies = modules_not_read(folder, model), tensors.copies
    theirs = {k: v for k, v in folder.shapes.items() if k not in ignored}
    if model.tied_head:
        theirs.pop("lm_head.weight", None)
    for name in sorted({*ours} - {*theirs} - {*copies}):
        yield f"lacks the tensor {name} {list(ours[name])}"
    for name in sorted({*theirs} - {*ours}):
        file = folder.file(name)
        yield f"has a tensor {name} {list(theirs[name])} that the model lacks ({file})"
    for name in sorted({*theirs} & {*ours}):
        params = tensors.tensors[name].params
        is_extra = not {*params} & {*tensors.infos}
        if is_extra and np.any(folder.read(name, [slice(None)])):
            key = "router_bias_rate" if name.endswith("correction_bias") else "bias"
            yield f"has {name}, which is not zero; set model.{key}"
        if theirs[name] != ours[name]:
            shapes = f"{list(theirs[name])}, the model {list(ours[name])}"
            yield f"has {name} as {shapes} ({folder.file(name)})"
        elif name in copies and not folder.equal(name, copies[name]):
            rule = f"has {name}, which differs from {copies[name]}; the modules of "
            yield f"{rule}model.predict_ahead share the model's (set it to 0)"
