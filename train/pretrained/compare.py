"""Open a folder of weights that transformers, or `train.export`, wrote, and compare it.

Settings, names and shapes are compared with the model's before anything is read.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from model.choices import Position
from model.params import named
from train.errors import ConfigError, Mistake
from train.pretrained.families import Family, family_of
from train.pretrained.settings import RATES, rope_of
from train.pretrained.tensors import Parts
from train.program import Program

_KEY = "init_from"
_INDEX = "model.safetensors.index.json"
_AGAIN = "Fetch or export the folder again"
# Of older files: masks and angles, which are no weights.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Folder:
    """A folder of weights, opened: what tensors there are, and of which shapes.

    settings: config.json.
    shapes: of the tensors by name.
    """

    def __init__(self, path: str, family: Family, stack: ExitStack):
        """Open all files; they are closed with the stack.

        Raises:
            ConfigError: if it is no such folder.
            DataError: naming a file that is missing or damaged.
        """
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            rule = 'needs the package safetensors; pip install -e ".[export]"'
            raise ConfigError([Mistake(_KEY, path, rule)]) from None
        folder = Path(path)
        try:
            self.settings: dict[str, Any] = json.loads(
                (folder / "config.json").read_text()
            )
        except (OSError, ValueError) as error:
            rule = "must be a folder with config.json and weights, or a run's "
            rule += f"({error})"
            raise ConfigError([Mistake(_KEY, path, rule)]) from None
        listed, files = _listed(folder)
        self.shapes, self._files = dict[str, tuple[int, ...]](), dict[str, Any]()
        there = set[str]()
        prefix = next(iter(family.names)).split(".")[0] + "."
        for file in files:
            try:
                opened = stack.enter_context(safe_open(folder / file, "numpy"))
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"{folder / file}: cannot be read ({error}). {_AGAIN}"
                ) from error
            there |= {*opened.keys()}
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                # GPT-2's files on the hub lack the prefix.
                long = name.startswith((prefix, "lm_head"))
                own = name if long else prefix + name
                if not own.endswith(_NO_WEIGHTS):
                    self.shapes[own] = tuple(opened.get_slice(name).get_shape())
                    self._files[own] = opened, name, file
        if missing := {*listed} - there:
            lost = min(missing)
            raise DataError(
                f"{folder / listed[lost]}: lacks {lost}, which {_INDEX} says it holds. "
                f"{_AGAIN}"
            )

    def read(self, name: str, *places: slice) -> np.ndarray:
        """Read a part of a tensor."""
        file, own, _ = self._files[name]
        return file.get_slice(own)[places or slice(None)]

    def file(self, name: str) -> str:
        """Return the file that holds a tensor."""
        return self._files[name][2]

    @property
    def digest(self) -> str:
        """The hash of settings, names and shapes."""
        known = json.dumps([self.settings, sorted(self.shapes.items())], sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()[:12]


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
        raise DataError(f"{index}: cannot be read ({error}). {_AGAIN}") from error


def check_folder(path: str, program: Program) -> dict[str, str]:
    """Compare a folder with a model; return what must be the same for all processes.

    Raises:
        ConfigError: with all that differs.
        DataError: naming a file that is missing or damaged.
    """
    family = family_of(program.config.model)
    with ExitStack() as stack:
        folder = Folder(path, family, stack)
        parts = parts_of_folder(folder, family, program)
        rules = [*_other_settings(folder, family, program)]
        rules = rules or [*_other_tensors(folder, parts, program)]
        if rules:
            raise ConfigError([Mistake(_KEY, path, rule) for rule in rules])
        return {"weights to start from": folder.digest}


def parts_of_folder(folder: Folder, family: Family, program: Program) -> Parts:
    """Return what the tensors are made of, with as many tokens as the folder has."""
    table = next(iter(family.names))
    rows = folder.shapes.get(table, (0,))[0]
    return Parts(family, program.config.model, program.infos, rows)


def _other_settings(folder: Folder, family: Family, program: Program) -> Iterator[str]:
    """Yield what the folder's config.json says otherwise, where it says it."""
    theirs, model = folder.settings, program.config.model
    if kept := theirs.get("quantization_config"):
        yield (
            f"holds quantized weights ({kept.get('quant_method')}), which are not "
            "read; let transformers load it with dequantize=True in its "
            "quantization_config, and start from what save_pretrained writes then"
        )
        return
    if theirs.get("model_type") not in (family.name, *family.also):
        yield (
            f"holds a model of type {theirs.get('model_type')}; model.* makes one of "
            f"family {family.name}"
        )
        return
    ours = {"sliding_window": model.window, "tie_word_embeddings": model.tied_head}
    ours |= family.settings(model)
    if not theirs.get("use_sliding_window", True):
        theirs = {**theirs, "sliding_window": None}
    for key, value in ours.items():
        there = theirs.get(key)
        if key.startswith("rope_") or key in RATES:
            continue
        if there is not None and there != value:
            yield f"has {key}={there} in its config.json, model.* makes it {value}"
    if model.position is not Position.rotary:
        return
    turned = rope_of(theirs)
    for kind, own in rope_of(ours).items():
        for key, value in own.items():
            there = turned.get(kind, {}).get(key)
            if there is not None and there != value:
                yield f"has {key}={there} in its config.json, model.* makes it {value}"


def _other_tensors(folder: Folder, parts: Parts, program: Program) -> Iterator[str]:
    """Yield tensors that one side lacks, or has in another shape."""
    model = program.config.model
    table = next(iter(parts.family.names))
    if parts.vocab_size > (model.vocab_size or 0):
        yield (
            f"has {parts.vocab_size} tokens, model.vocab_size is {model.vocab_size}; "
            f"set model.vocab_size={parts.vocab_size} ({folder.file(table)})"
        )
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
        if not {*params} & {*parts.infos} and np.any(folder.read(name)):
            yield f"has {name}, which is not zero; set model.bias=true"
        if theirs[name] != ours[name]:
            shapes = f"{list(theirs[name])}, the model {list(ours[name])}"
            yield f"has {name} as {shapes} ({folder.file(name)})"
