"""Open a folder of weights that transformers, or `train.export`, wrote, and compare it.

Settings, names and shapes are compared with the model's before anything is read.
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
from model.choices import Mlp, Position
from model.config import ModelConfig
from model.params import named
from train.errors import ConfigError, Mistake, as_typed
from train.pretrained.families import FAMILIES, SOME, Family
from train.pretrained.settings import (
    KEYS,
    NULL_IS_NONE,
    RATES,
    ROPE_KEYS,
    pattern_of,
    rope_of,
    with_layer_types,
)
from train.pretrained.tensors import Parts
from train.program import Program

_KEY = "init_from"
_INDEX = "model.safetensors.index.json"
_AGAIN = "Fetch or export the folder again"
# Older files contain masks and angles, which are no weights.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Folder:
    """The opened files of a folder of weights: its settings, and shapes by tensor.

    The files are closed with `stack`.

    Raises:
        ConfigError: if it is no such folder.
        DataError: naming a file that is missing or damaged.
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
        listed, files = _listed(folder)
        self.shapes, self._files = dict[str, tuple[int, ...]](), dict[str, Any]()
        stored = set[str]()
        prefix = family.table.split(".")[0] + "."
        for file in files:
            try:
                opened = stack.enter_context(safe_open(folder / file, "numpy"))
            except (OSError, SafetensorError) as error:
                raise _unreadable(folder / file, error) from error
            stored |= {*opened.keys()}
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                # GPT-2's files on the hub lack the prefix.
                long = name.startswith((prefix, "lm_head"))
                short_name = name if long else prefix + name
                if not short_name.endswith(_NO_WEIGHTS):
                    self.shapes[short_name] = tuple(opened.get_slice(name).get_shape())
                    self._files[short_name] = opened, name, file
        if missing := {*listed} - stored:
            lost = min(missing)
            file, rule = folder / listed[lost], f"which {_INDEX} says it holds"
            raise DataError(f"{file}: lacks {lost}, {rule}. {_AGAIN}")

    def read(self, name: str, places: Sequence[slice]) -> np.ndarray:
        """Read a part of a tensor: one slice for each dim."""
        file, stored_name, _ = self._files[name]
        return file.get_slice(stored_name)[tuple(places)]

    def file(self, name: str) -> str:
        """Return the file that holds a tensor."""
        return self._files[name][2]

    @property
    def digest(self) -> str:
        """The hash of settings, names and shapes."""
        described = [self.settings, sorted(self.shapes.items())]
        text = json.dumps(described, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def weight_files(folder: Path) -> list[str]:
    """Return the files of a folder that decide which weights are read.

    Raises:
        DataError: if its index is damaged.
    """
    listed, files = _listed(folder)
    return ["config.json", *([_INDEX] if listed else []), *files]


def _listed(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the file of each tensor as the index has it, if any, and all files."""
    index = folder / _INDEX
    if not index.exists():
        return {}, ["model.safetensors"]
    try:
        listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return listed, sorted({*listed.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(index, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"{file}: cannot be read ({error}). {_AGAIN}")


def check_folder(path: str, program: Program) -> dict[str, str]:
    """Compare a folder with a model; return what must be the same for all processes.

    Raises:
        ConfigError: with all that differs.
        DataError: naming a file that is missing or damaged.
    """
    family = family_of_folder(path, program.config.model)
    with ExitStack() as stack:
        folder = Folder(path, family, stack)
        parts = parts_of_folder(folder, family, program)
        if rules := [*_other_tensors(folder, parts, program)]:
            raise ConfigError([Mistake(_KEY, path, rule) for rule in rules])
        return {"weights to start from": folder.digest}


def parts_of_folder(folder: Folder, family: Family, program: Program) -> Parts:
    """Return what the tensors are made of, with as many tokens as the folder has."""
    rows = folder.shapes.get(family.table, (0,))[0]
    return Parts(family, program.config.model, program.infos, rows)


def _settings_in(path: str) -> dict[str, Any]:
    """Return what is in a folder's config.json."""
    try:
        return json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError) as error:
        rule = f"must be a folder with config.json and weights, or a run's ({error})"
        raise ConfigError([Mistake(_KEY, path, rule)]) from None


def family_of_folder(path: str, model: ModelConfig) -> Family:
    """Return the family of a folder's model, if by its settings it is this model.

    Raises:
        ConfigError: if not, with what to type to take its settings.
    """
    theirs = _settings_in(path)
    kind, quantization = theirs.get("model_type"), theirs.get("quantization_config")
    named = [f for f in FAMILIES if kind in (f.name, *f.also)]
    if quantization:
        rule = f"holds quantized weights ({quantization.get('quant_method')}), which "
        rule += "cannot be read; load it in transformers with dequantize=True in its "
        rule += "quantization_config, and start from the folder that save_pretrained "
        rule += "writes"
    elif not named:
        rule = f"holds a model of type {kind}, which is none of "
        rule += ", ".join(family.name for family in FAMILIES)
    else:
        family = min(named, key=lambda family: len(family.unmet(model)))
        differing = {
            f"model.{key}": (have, None if callable(family.needs[key]) else need)
            for key, (have, need) in family.unmet(model).items()
        }
        differing |= _other_settings(theirs, family, model)
        if theirs.get("vocab_size", 0) > (model.vocab_size or 0):
            differing["model.vocab_size"] = model.vocab_size, theirs["vocab_size"]
        if not differing:
            return family
        our_settings = family.settings(model)
        for name, key in _keys(family).items():  # settings that depend on keys
            there = theirs.get(name) if name in our_settings else None
            if there is not None and getattr(model, key) is None:
                there = pattern_of(there) if name == "layer_types" else there
                differing.setdefault(f"model.{key}", (None, there))
        rule = f"holds a model of type {kind}, and model.* makes another:"
        for key, (here, there) in differing.items():
            there = "set" if there is SOME else as_typed(there)
            rule += f"\n  {key} is {as_typed(here)}, there {there}"
        typed = [
            f"{key}={as_typed(there)}"
            for key, (_, there) in differing.items()
            if key.startswith("model.") and there is not SOME
        ]
        rule += f"\nto take its settings type {shlex.join(typed)}" if typed else ""
    raise ConfigError([Mistake(_KEY, path, rule)])


def _other_settings(
    theirs: dict[str, Any], family: Family, model: ModelConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the model's value and that of config.json, where it has another one.

    By our key, where one makes that setting, else by the setting's name.
    """
    ours = {"sliding_window": model.window, "tie_word_embeddings": model.tied_head}
    ours |= family.settings(model)
    theirs = with_layer_types(theirs, model.num_layers)
    if not theirs.get("use_sliding_window", True):
        theirs = {**theirs, "sliding_window": None}
    others = {k: v for k, v in ours.items() if k[:5] != "rope_" and k not in RATES}
    pairs = [(others, theirs, _keys(family))]
    if family.needs["position"] is Position.rotary:
        there, here = rope_of(theirs), rope_of(ours)
        for layers, keys in ROPE_KEYS.items():
            our_values, their = here.get(layers, {}), there.get(layers, {})
            if our_values.get("rope_type") != their.get("rope_type"):
                our_values = dict.fromkeys(keys.keys() & their.keys()) | our_values
            pairs.append((our_values, their, keys))
    differing = dict[str, tuple[Any, Any]]()
    for our_values, their, keys in pairs:
        for name, value in our_values.items():
            there = their.get(name)
            is_set = there is not None or (name in their and name in NULL_IS_NONE)
            if is_set and there != value:
                key = f"model.{keys[name]}" if name in keys else name
                if name == "layer_types" and there is not None:
                    value, there = pattern_of(value), pattern_of(there)
                pair = ("none" if x == "default" else x for x in (value, there))
                differing[key] = next(pair), next(pair)
    return differing


def _keys(family: Family) -> dict[str, str]:
    """Return the key of `model.*` that makes a setting of this family."""
    experts = family.needs.get("mlp") is Mlp.moe
    return KEYS | {"intermediate_size": "expert_dim"} if experts else KEYS


def _other_tensors(folder: Folder, parts: Parts, program: Program) -> Iterator[str]:
    """Yield tensors that one side lacks, or has in another shape."""
    model = program.config.model
    if parts.vocab_size > (model.vocab_size or 0):
        theirs, file = parts.vocab_size, folder.file(parts.family.table)
        rule = f"has {theirs} tokens, model.vocab_size is {model.vocab_size}; "
        yield f"{rule}set model.vocab_size={theirs} ({file})"
        return
    ours = parts.shapes(dict(named(program.state.params)))
    theirs = dict(folder.shapes)
    if model.tied_head:
        theirs.pop("lm_head.weight", None)
    for name in sorted({*ours} - {*theirs}):
        yield f"lacks the tensor {name} {list(ours[name])}"
    for name in sorted({*theirs} - {*ours}):
        file = folder.file(name)
        yield f"has a tensor {name} {list(theirs[name])} that the model lacks ({file})"
    for name in sorted({*theirs} & {*ours}):
        params = parts.tensors[name].params
        if not {*params} & {*parts.infos} and np.any(folder.read(name, [slice(None)])):
            yield f"has {name}, which is not zero; set model.bias=true"
        if theirs[name] != ours[name]:
            shapes = f"{list(theirs[name])}, the model {list(ours[name])}"
            yield f"has {name} as {shapes} ({folder.file(name)})"
