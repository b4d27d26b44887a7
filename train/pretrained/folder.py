"""Write a run's model as a folder that transformers loads.

The folder holds weights, settings, a tokenizer and a model card. Each file is written
atomically. config.json is written last, because no program loads a folder without it.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tiktoken
from etils import epath

from data.beginning import beginning_of
from data.encoding import FolderEncoding
from data.errors import Mistake
from data.phases import tokens_before
from data.sources import Sources
from data.storage import is_remote, write_atomically
from data.tokenizer_folder import GENERATION_FILE, MODEL_FILE, TOKEN_IDS
from data.tokenizer_json import SAMPLE, check_same_ids, tokenizer_files
from model.choices import Position, Scaling
from model.config import ModelConfig
from model.params import named
from train.errors import ConfigError
from train.pretrained.families import family_of
from train.pretrained.family import Family
from train.pretrained.tensors import FamilyTensors
from train.pretrained.weights import write_json, write_weights
from train.resolve.program import ConfiguredProgram
from train.run.folder import run_folder
from train.run.starts import read_results
from train.run.validations import headline
from train.units import format_count

_CHECKED_BYTES = 10_000_000  # the size of the validation text that checks the tokenizer


def require_empty_folder(output: str) -> epath.Path:
    """Return the empty output folder, and create it if it is local.

    Raises:
        ConfigError: if the folder is not empty, or cannot be reached.
    """
    folder = run_folder(output, key="output")
    if folder.exists() and any(folder.iterdir()):
        rule = "must be a new folder, or an empty one: nothing is overwritten"
        raise ConfigError([Mistake("output", output, rule)])
    if not is_remote(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def write_folder(
    folder: epath.Path,
    program: ConfiguredProgram,
    params: Any,
    sources: Sources,
    step: int,
    dtype: str,
    with_tokenizer: bool,
    family_name: str | None = None,
) -> str:
    """Write a checkpoint into an empty folder; return a line about its contents.

    Process 0 writes the parameters of all processes as `dtype`. `family_name` names a
    family, if several fit the model.

    Raises:
        ConfigError: if no family fits the model.
        DataError: if the exported tokenizer would encode text to other ids.
    """
    config = program.config
    encoding = sources.encoding
    beginning = beginning_of(config.data, encoding)
    model = config.model
    length = config.data.sequence_length
    family = family_of(model, family_name)
    is_writer = jax.process_index() == 0
    if with_tokenizer and is_writer:
        files = tokenizer_files(encoding, length, encoding.decode([beginning.token]))
        text = sources.text("validation", _CHECKED_BYTES).decode(errors="replace")
        check_same_ids(encoding, files["tokenizer.json"], [SAMPLE, text])
        for name, content in files.items():
            write_atomically(folder / name, content)
    tensors = FamilyTensors(family, model, program.infos, encoding.n_vocab)
    num_params = write_weights(folder, tensors, dict(named(params)), jnp.dtype(dtype))
    if is_writer:
        results = read_results(run_folder(config.run.dir or ""))
        text = model_card(program, encoding, num_params, step, results)
        write_atomically(folder / "README.md", text)
        settings = exported_settings(family, model, encoding, length, dtype)
        imported = encoding.files if isinstance(encoding, FolderEncoding) else {}
        settings |= json.loads(imported.get(MODEL_FILE, "{}"))
        settings["bos_token_id"] = beginning.token
        if generation := imported.get(GENERATION_FILE):
            write_atomically(folder / GENERATION_FILE, generation)
        else:
            special_tokens = {key: settings[key] for key in TOKEN_IDS[:2]}
            write_json(folder / GENERATION_FILE, special_tokens)
        write_json(folder / "config.json", settings)
    description = f"{format_count(num_params)} parameters in {dtype}"
    return f"{description}, a model of family {family.name}"


def exported_settings(
    family: Family,
    model: ModelConfig,
    encoding: tiktoken.Encoding,
    length: int,
    dtype: str,
) -> dict[str, Any]:
    """Return the content of config.json; `length` is the length of a training row."""
    if model.position is Position.learned:
        length = model.max_sequence_length or length
    scaling = model.rope_scaling
    if scaling.kind is Scaling.yarn and scaling.original_length:
        # Version 4 of transformers computes the factor from the two lengths.
        length = round(scaling.factor * scaling.original_length)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": encoding.n_vocab,
        family.length_key: length,
        "tie_word_embeddings": model.tied_head,
        "dtype": dtype,
        "torch_dtype": dtype,  # read by transformers before version 5
        "bos_token_id": encoding.eot_token,
        "eos_token_id": encoding.eot_token,
        "pad_token_id": None,  # a family's default id may be an ordinary token here
        **family.settings(model),
    }


def model_card(
    program: ConfiguredProgram,
    encoding: tiktoken.Encoding,
    num_params: int,
    step: int,
    results: dict[str, Any],
) -> str:
    """Return a model card with the model, its training data and its validation loss."""
    config = program.config
    tokens = tokens_before(config.data, step)
    lines = [
        f"# {config.model.name}",
        "",
        f"A language model of {num_params:,} parameters, trained with Longhaul for "
        f"{step:,} steps and {format_count(tokens)} tokens, with rows of "
        f"{config.data.sequence_length}.",
        "",
        f"- Text: {config.data.name}",
        f"- Tokenizer: {encoding.name}, {encoding.n_vocab:,} tokens",
        f"- Optimizer: {config.optimizer.name}, seed {config.seed}",
    ]
    prefix = headline(results)
    loss, bits = (results.get(f"{prefix}/{key}") for key in ("loss", "bits_per_byte"))
    if results.get("step") == step and loss is not None:
        lines.append(
            f"- Validation: {loss:.4f} nats a token, {bits:.3f} bits per byte, on "
            f"{results['scored_tokens']:,} tokens"
        )
    example = "AutoModelForCausalLM.from_pretrained(folder)"
    lines += ["", f"Load it with transformers: `{example}`.", ""]
    return "\n".join(lines)
