"""A run starts from undamaged weights, or it does not start."""

import json
import random

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from data.errors import DataError
from model.catalog import MODEL_PARTS
from model.gpt import GPT, params_of
from model.params import is_info, named
from tests.train.pretrained.conftest import BYTES, export
from train.cli.schema import config_yaml
from train.config import CheckpointConfig
from train.errors import ConfigError
from train.pretrained import weights
from train.pretrained.begin import (
    RECORD,
    check_weights,
    record_or_check_files,
    start_from,
)
from train.run.checkpoint import Checkpoints
from train.run.folder import run_folder
from train.run.restore import ALONE

SMALL = ("model=llama_nano", "model.num_layers=1", "model.embed_dim=16")
VOCABULARY = f"model.vocab_size={BYTES.n_vocab}"


@pytest.fixture
def folder(programs, tmp_path, monkeypatch):
    """Return a folder of several files, and the program that it fits."""
    program = programs([*SMALL, VOCABULARY], devices=1)
    monkeypatch.setattr(weights, "FILE_BYTES", 20_000)
    params = params_of(GPT(program.config.model, nnx.Rngs(0), MODEL_PARTS))
    export(tmp_path / "exported", program, params)
    check_weights(str(tmp_path / "exported"), program)
    return tmp_path / "exported", program


def test_a_flipped_bit_anywhere_is_found_and_named(folder, tmp_path):
    """A hundred bits are flipped, in payloads, headers, the index and the settings."""
    path, _ = folder
    run = run_folder(str(tmp_path / "run"))
    draw = random.Random(0)
    record_or_check_files(str(path), run, ALONE)
    files = sorted(path.iterdir())
    assert {*json.loads((run / RECORD).read_text())} == {file.name for file in files}
    for _ in range(100):
        file = draw.choice(files)
        content = file.read_bytes()
        index = draw.randrange(len(content))
        new_byte = content[index] ^ 1 << draw.randrange(8)
        file.write_bytes(content[:index] + bytes([new_byte]) + content[index + 1 :])
        with pytest.raises(DataError, match=file.name):
            record_or_check_files(str(path), run, ALONE)
        file.write_bytes(content)
    record_or_check_files(str(path), run, ALONE)


def _damage(file, kind: str, draw: random.Random) -> None:
    """Damage a file of tensors so that it shows without a record."""
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])
    elif kind == "header":
        content = bytearray(file.read_bytes())
        # This changes the length of the header.
        content[draw.randrange(8)] ^= 1 << draw.randrange(1, 8)
        file.write_bytes(content)
    elif kind == "gone":
        file.unlink()
    else:
        arrays = load_file(file)
        name = draw.choice(sorted(arrays))
        if kind == "shape":
            arrays[name] = np.concatenate([arrays[name], arrays[name][:1]])
        else:
            del arrays[name]
        save_file(arrays, file)


@pytest.mark.parametrize("kind", ["truncated", "header", "gone", "shape", "lacking"])
def test_damage_is_found_and_named_at_the_first_start(folder, kind):
    """Each kind of damage is tried twenty times."""
    path, program = folder
    draw = random.Random(kind)
    files = sorted(path.glob("*.safetensors"))
    for _ in range(20):
        file = draw.choice(files)
        content = file.read_bytes()
        _damage(file, kind, draw)
        with pytest.raises((DataError, ConfigError)) as error:
            check_weights(str(path), program)
        assert file.name in str(error.value)
        file.write_bytes(content)
    check_weights(str(path), program)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_weights_that_are_not_finite_are_refused_and_named(folder, value):
    path, program = folder
    file = min(path.glob("*.safetensors"))
    arrays = load_file(file)
    arrays[min(arrays)].flat[-1] = value
    save_file(arrays, file)
    with pytest.raises(DataError) as error:
        start_from(str(path), program)
    assert "values that are not finite" in str(error.value)
    assert "params." in str(error.value)


@pytest.fixture(scope="module")
def other(programs, tmp_path_factory):
    """Return another run's directory, and the averaged weights of its newest step."""
    program = programs([*SMALL, "optimizer.ema_decay=0.9", VOCABULARY], devices=1)
    path = tmp_path_factory.mktemp("runs") / "other"
    path.mkdir()
    (path / "config.yaml").write_text(config_yaml(program.config))
    state = program.init()
    average = jax.tree.map(lambda x: x + 1, state.params)
    state = state._replace(optimizer=state.optimizer._replace(average=average))
    checkpoints = Checkpoints(run_folder(str(path)) / "checkpoints", CheckpointConfig())
    checkpoints.save(3, state, {"step": 3})
    checkpoints.close()
    return path, dict(named(jax.device_get(average)))


@pytest.mark.slow
def test_another_runs_weights_fit_any_mesh_optimizer_and_vocabulary(programs, other):
    path, theirs = other
    mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=1")
    vocabulary = "model.vocab_size=264", "mesh.params.vocab=null"
    program = programs([*SMALL, *mesh, *vocabulary, "optimizer=muon"], devices=4)
    check_weights(str(path), program)
    state = start_from(str(path), program)
    initial = dict(named(jax.device_get(program.init().params)))
    assert int(state.step) == 0
    assert jax.tree.map(lambda x: x.sharding, state) == program.shardings
    infos = dict(named(program.infos, is_info))
    for name, actual in named(jax.device_get(state.params)):
        expected = theirs[name]
        if "vocab" in infos[name].axes:
            dim = infos[name].axes.index("vocab")
            actual, padding = np.split(actual, [BYTES.n_vocab], axis=dim)
            _, initial_padding = np.split(initial[name], [BYTES.n_vocab], axis=dim)
            np.testing.assert_array_equal(padding, initial_padding)
        np.testing.assert_array_equal(actual, expected)


def test_another_runs_model_must_be_the_same_and_saved(programs, tmp_path):
    config = programs([*SMALL, VOCABULARY], devices=1).config
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    changes = ("model.num_heads=2", "model.norm_epsilon=0.1", "model.vocab_size=200")
    with pytest.raises(ConfigError) as error:
        check_weights(str(tmp_path), programs([*SMALL, *changes], devices=1))
    rules = " ".join(mistake.rule for mistake in error.value.mistakes)
    for remedy in ("model.num_heads=4", "model.norm_epsilon=1e-05", "set it to 257"):
        assert remedy in rules
    with pytest.raises(ConfigError, match="without a checkpoint"):
        check_weights(str(tmp_path), programs([*SMALL, VOCABULARY], devices=1))
