"""A config.json without a setting means what it means to transformers.

Each setting is left out in turn, also nested ones, in the spellings of versions 4 and 5
of transformers. A folder that is accepted computes in transformers what it computed
with all its settings; any other is refused.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.pretrained import class_defaults
from tests.train.pretrained.conftest import (
    BYTES,
    FAMILY_NAMES,
    MODELS,
    export,
    perturbed,
)
from train.errors import ConfigError
from train.pretrained import class_settings
from train.pretrained.compare import check_folder

VOCABULARY = f"model.vocab_size={BYTES.n_vocab}"
# Keys that say nothing about logits.
ALWAYS_FREE = {"architectures", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"}


def without(settings: Any, path: tuple[str, ...]) -> Any:
    """Return the settings without the one at a path."""
    key, *remaining = path
    if remaining:
        return settings | {key: without(settings[key], tuple(remaining))}
    return {k: v for k, v in settings.items() if k != key}


def paths_in(settings: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each setting, including nested ones."""
    for key, value in settings.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in paths_in(value))


def spellings(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config.json as exported, as version 5 writes it, and as version 4 did."""
    yield settings
    old_keys = {"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype"}
    if "rope_parameters" in settings:
        yield {k: v for k, v in settings.items() if k not in old_keys}
        yield without(settings, ("rope_parameters",))
        scaling = settings["rope_scaling"]
        # transformers ignores `type` if rotations depend on the kind of layer.
        if scaling and "full_attention" not in settings["rope_parameters"]:
            old_scaling = {k: v for k, v in scaling.items() if k != "rope_type"}
            old_scaling |= {"type": scaling["rope_type"]}
            yield without(settings, ("rope_parameters",)) | {
                "rope_scaling": old_scaling
            }


def variants(settings: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is left out, and the config.json without it."""
    for number, spelling in enumerate(spellings(settings)):
        yield f"{number}: nothing", spelling
        for path in paths_in(spelling):
            yield f"{number}: {'.'.join(path)}", without(spelling, path)
    rope_keys = {"rope_parameters", "rope_scaling", "rope_theta"}
    rope_keys |= {"rope_local_base_freq", "partial_rotary_factor"}
    yield "all of rope", {k: v for k, v in settings.items() if k not in rope_keys}


def test_the_table_of_defaults_is_that_of_transformers():
    pytest.importorskip("transformers")
    table = json.loads(class_defaults.FILE.read_text())
    assert table == json.loads(json.dumps(class_defaults.class_defaults()))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_out_is_the_default_or_refused(programs, tmp_path: Path, name):
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
    program = programs([*MODELS[name], "model.num_layers=2", VOCABULARY], devices=1)
    params = perturbed(program.config.model)
    export(tmp_path, program, params, family=FAMILY_NAMES.get(name))
    file = tmp_path / "config.json"
    full_settings = json.loads(file.read_text())
    tokens = torch.tensor(np.random.default_rng(0).integers(0, BYTES.n_vocab, (2, 40)))

    def read_settings() -> dict[str, Any]:
        """Return all settings that transformers' model reads."""
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        names = class_settings.class_defaults()[config.model_type].settings
        names = {*names, "rope_parameters", "head_dim"} - {"max_position_embeddings"}
        return {key: getattr(config, key, None) for key in names}

    def logits() -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            return model(tokens).logits.numpy()

    expected = logits()
    expected_settings = read_settings()
    accepted = set[str]()
    refused = set[str]()
    for left_out, settings in variants(full_settings):
        file.write_text(json.dumps(settings))
        try:
            check_folder(str(tmp_path), program)
        except ConfigError:
            refused.add(left_out)
            continue
        accepted.add(left_out)
        if read_settings() == expected_settings:
            continue
        np.testing.assert_allclose(logits(), expected, atol=1e-6, err_msg=left_out)
    complete_spellings = {key for key in accepted if key.endswith(": nothing")}
    print(f"{name}: {len(accepted)} accepted, {len(refused)} refused")
    assert len(complete_spellings) == len([*spellings(full_settings)]), refused
    assert {f"0: {key}" for key in ALWAYS_FREE} <= accepted
