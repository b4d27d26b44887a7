"""Open a folder of weights and compare it with a model.

The folder comes from transformers or `train.export`. Settings, tensor names and shapes
are compared before weights are read.
"""

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, Mistake
from data.names import checked_name
from data.storage import check_regular
from model.choices import Position
from model.config import ModelConfig
from model.params import named
from train.errors import ConfigError
from train.pretrained.family import Family
from train.pretrained.folder_family import (
    class_of,
    family_of_folder,
    resolved_settings,
    settings_in,
)
from train.pretrained.folder_settings import PREDICTION_LAYERS
from train.pretrained.fused import Part, parts_of_experts
from train.pretrained.tensors import FamilyTensors
from train.resolve.program import ConfiguredProgram

_KEY = "init_from"
_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_COMPARED_ROWS = 4096  # The number of rows that are compared at once.
_REMEDY = "Fetch or export the folder again"
# The ends of names of masks and rotary frequencies, which older files also contain.
_FREQUENCIES = (".rotary_emb.inv_freq",)
_MASKS = (".attn.bias", ".attn.masked_bias")
# The encoder of images in a published model, whose text model has a prefix.
_ENCODER = "model.visual."
_TEXT_PREFIX = "model.language_model."
_HEAD = "lm_head.weight"
# The exceptions that reading a malformed index may raise.
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Folder:
    """An opened folder of weights: its settings, and its tensors' shapes by name.

    `not_read` has a phrase for each kind of tensors and files that are not read.

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
        self._path = path
        self._family = family
        if (folder / "adapter_config.json").exists():
            rule = "holds an adapter (adapter_config.json), which cannot be read; "
            rule += "merge it into its model (peft: merge_and_unload), and save that"
            raise ConfigError([Mistake(_KEY, path, rule)])
        self.settings = settings_in(path)
        file_of, files = _read_index(folder)
        self.shapes = dict[str, tuple[int, ...]]()
        self._files = dict[str, Any]()
        self.not_read = Counter(_other_weights(folder, files))
        stored_names = set[str]()
        is_rotary = family.needs["position"] is Position.rotary
        is_composite = class_of(self.settings)[0] != self.settings.get("model_type")
        prefix = family.embedding_tensor.split(".")[0] + "."
        for file in files:
            try:
                check_regular(folder / file)
                opened = stack.enter_context(safe_open(folder / file, "numpy"))
            except (OSError, SafetensorError) as error:
                raise _unreadable(folder / file, error) from error
            stored_names |= {*opened.keys()}
            for name in opened.keys():  # noqa: SIM118, a safetensors file is not iterable
                if is_composite and name.startswith(_ENCODER):
                    self.not_read["of the encoder of images"] += 1
                    continue
                # GPT-2's files on the hub lack the prefix.
                has_prefix = name.startswith((prefix, "lm_head", "mtp."))
                full_name = name if has_prefix else prefix + name
                if is_composite:
                    full_name = full_name.replace(_TEXT_PREFIX, prefix)
                if full_name.endswith(_FREQUENCIES if is_rotary else _MASKS):
                    self.not_read["of masks or rotary frequencies"] += 1
                    continue
                shape = tuple(opened.get_slice(name).get_shape())
                parts = {full_name: Part(shape)}
                if family.has_single_experts:
                    parts = parts_of_experts(full_name, shape) or parts
                for part_name, part in parts.items():
                    if part_name in self.shapes:
                        raise DataError(
                            f"{folder / file}: has {name}, and {self.file(part_name)} "
                            f"has the same tensor. {_REMEDY}"
                        )
                    self.shapes[part_name] = part.shape
                    self._files[part_name] = opened, name, file, part
        if missing_names := {*file_of} - stored_names:
            missing = min(missing_names)
            file = folder / file_of[missing]
            rule = f"which {_INDEX} says it holds"
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

    @functools.cached_property
    def resolved(self) -> dict[str, Any]:
        """The settings, with the defaults of the class in transformers."""
        return resolved_settings(self._path, self._family)

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
        return {}, [_SINGLE_FILE]
    try:
        check_regular(index)
        file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted({*map(checked_name, file_of.values())})
    except _MALFORMED as error:
        raise _unreadable(index, error) from error
    if (folder / _SINGLE_FILE).exists() and files != [_SINGLE_FILE]:
        raise DataError(
            f"{index}: lists other files than {_SINGLE_FILE}, which the folder holds "
            f"too and transformers would read instead. Delete what is out of date"
        )
    return file_of, files


def _other_weights(folder: Path, files: Sequence[str]) -> dict[str, int]:
    """Return a phrase and 1 for each file of weights that is not read."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
    names = sorted(x.name for x in folder.iterdir() if x.name.endswith(suffixes))
    return {f"in {name}": 0 for name in names if name not in files}


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"{file}: cannot be read ({error}). {_REMEDY}")


def check_folder(path: str, program: ConfiguredProgram) -> dict[str, str]:
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
    folder: Folder, family: Family, program: ConfiguredProgram
) -> FamilyTensors:
    """Return the tensors of the program's model with the folder's vocabulary size."""
    vocab_size = folder.shapes.get(family.embedding_tensor, (0,))[0]
    return FamilyTensors(family, program.config.model, program.infos, vocab_size)


def modules_not_read(folder: Folder, family: Family, model: ModelConfig) -> set[str]:
    """Return the tensors of prediction modules if the model has no modules."""
    if model.predict_ahead or not family.ahead_names:
        return set()
    settings = folder.resolved
    counts = [x for key in PREDICTION_LAYERS if isinstance(x := settings.get(key), int)]
    layers = range(model.num_layers, model.num_layers + max(counts, default=0))
    is_layer = re.compile(r"model\.layers\.(\d+)\.")
    return {
        name
        for name in folder.shapes
        if name.startswith("mtp.")
        or ((match := is_layer.match(name)) and int(match[1]) in layers)
    }


def _table_differences(folder: Folder, family: Family) -> Iterator[str]:
    """Yield a phrase for each table without the rows that config.json announces."""
    sizes = {family.embedding_tensor: "vocab_size"}
    if family.needs["position"] is Position.learned:
        sizes["transformer.wpe.weight"] = family.length_key
    for name, key in sizes.items():
        rows = folder.shapes.get(name, (0,))[0]
        announced = folder.resolved[key]
        if rows not in (0, announced):
            by_default = " by default" * (key not in class_of(folder.settings)[1])
            rule = f"has {rows} rows in {name}, but {key} in config.json is {announced}"
            yield f"{rule}{by_default}, with which transformers cannot load it"


def _tensor_differences(
    folder: Folder, tensors: FamilyTensors, program: ConfiguredProgram
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
    ignored = modules_not_read(folder, tensors.family, model)
    copies = tensors.copies
    embedding = tensors.family.embedding_tensor
    theirs = {k: v for k, v in folder.shapes.items() if k not in ignored}
    yield from _table_differences(folder, tensors.family)
    if _HEAD in theirs and embedding in theirs:
        is_shared = theirs[_HEAD] == theirs[embedding]
        is_shared = is_shared and folder.equal(_HEAD, embedding)
        if model.tied_head:
            del theirs[_HEAD]
            if not is_shared:
                rule = f"has {_HEAD}, which differs from {embedding}"
                yield f"{rule}; set model.tied_head=false"
        elif is_shared and folder.resolved["tie_word_embeddings"]:
            yield "uses its embedding as the head's weight; set model.tied_head=true"
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
