"""What the guides add to the source works as it stands there."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY

READ = """
from data.catalog import FORMATS
from data.text.classify import classify
from data.text.documents import read_documents
from data.text.files import units_of
from data.text.find import find_files
from data.text.records import ReadSettings

for name in ("plain", "packed"):
    (file,) = classify(find_files([name], "**/*"), ReadSettings(), FORMATS).files
    assert file.format.name == "fasta"
    units = units_of(file)
    found = [one for unit in units for one in read_documents(unit, ReadSettings())]
    assert [one.id for one in found] == [f"sequence {n}" for n in range(20_000)]
    assert {one.text for one in found} == {b"ACGT" * 99 + b"\\n"}
"""
# The gradient of the configured loss, which computes logits in tiles, next to that of a
# formula for all logits at once.
COMPARE_GRADIENTS = """
import jax
import jax.numpy as jnp
from model.catalog import MODEL_PARTS
from model.config import ModelConfig
from model.execution import Execution, Numerics
from model.gpt import GPT, bind, params_of
from flax import nnx
from data.batch import Batch
from train.config import TrainConfig
from train.core.step import make_gradients
from train.resolve.program import recipe_of

config = ModelConfig(num_layers=1, embed_dim=16, num_heads=2, vocab_size=128)
model = GPT(config, nnx.Rngs(0), MODEL_PARTS)
params = jax.tree.map(lambda x: 4 * x, params_of(model))
execution = Execution(Numerics(compute_dtype=jnp.dtype("float32")))
tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 128)
positions = jnp.tile(jnp.arange(16), (2, 1))
batch = Batch(tokens[:, :-1], tokens[:, 1:], None, positions)

def plain_loss(params):
    bound = bind(model, params)
    x, *_ = bound.features(batch.inputs, batch.positions, None, execution)
    log_probs = jax.nn.log_softmax(bound.logits(x, execution))
    log_p = jnp.take_along_axis(log_probs, batch.targets[..., None], -1)
    return jnp.mean((1 - jnp.exp(log_p)) ** 2 * -log_p)

recipe = recipe_of(TrainConfig(loss_chunk_tokens=4))
step = jax.jit(make_gradients(model, execution, recipe))
actual = jax.tree.leaves(step(params, batch).grads)
expected = jax.tree.leaves(jax.jit(jax.grad(plain_loss))(params))
for x, y in zip(actual, expected, strict=True):
    assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)
"""


# Features of rows in one call, next to those of two calls with a cache between them.
COMPARE_CACHED = """
import jax
import jax.numpy as jnp
from flax import nnx
from model.catalog import MODEL_PARTS
from model.execution import Execution, Numerics
from model.gpt import GPT
from train.config import ModelSection

sizes = dict(num_layers=4, num_heads=2, embed_dim=16, vocab_size=32)
config = ModelSection(mixer_pattern=("convolution", "attention"), **sizes)
model = GPT(config, nnx.Rngs(0), MODEL_PARTS)
execution = Execution(Numerics(compute_dtype=jnp.dtype("float32")))
tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 32)
positions = jnp.tile(jnp.arange(12), (2, 1))
whole, *_ = model.features(tokens, positions, None, execution)
cache = model.empty_cache(2, 12, execution)
for part in (slice(0, 2), slice(2, 12)):
    inputs = tokens[:, part], positions[:, part]
    x, cache, _ = model.features(*inputs, None, execution, cache)
    assert jnp.allclose(x, whole[:, part], atol=1e-5)
"""
GUIDES = REPOSITORY / "docs/guides"
SOURCE = "configs", "data", "launch", "model", "train"


def copy_with_diffs(text: str, packages: Sequence[str], folder: Path) -> None:
    """Copy packages to a folder, and apply the diffs in a text."""
    for package in packages:
        shutil.copytree(REPOSITORY / package, folder / package)
    diffs = re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S)
    assert diffs
    ceiling = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for diff in diffs:
        subprocess.run(
            ["git", "apply", "-"],
            cwd=folder,
            input=diff,
            text=True,
            check=True,
            env=os.environ | ceiling,
        )


def section_of(page: str, title: str) -> str:
    """Return the text of a guide from a title to the next."""
    text = (GUIDES / page).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def run_python(folder: Path, *arguments: str) -> None:
    """Run Python on the source in a folder."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """Return a folder with all diffs of the guides applied to the source."""
    pages = ("extending.md", "adding-a-model.md")
    text = "".join((GUIDES / page).read_text() for page in pages)
    copy_with_diffs(text, SOURCE, tmp_path)
    return tmp_path


def test_the_diffs_of_the_guides_apply_together(extended: Path):
    added = (
        ("configs/optimizer/yogi.yaml", "name: yogi"),
        ("train/core/optimizer/schedule.py", "Schedule.inverse_sqrt"),
        ("model/mixer_catalog.py", "CONVOLUTION"),
    )
    for path, text in added:
        assert text in (extended / path).read_text()


@pytest.mark.slow
def test_a_tree_with_these_diffs_trains(extended: Path):
    new = ["optimizer=yogi", "schedule=inverse_sqrt", "model.activation=silu"]
    small = ["model.num_layers=1", "data.batch_size=2", "train.num_steps=3"]
    small += ["eval.num_batches=1", "eval.final_num_batches=1"]
    records = ["tracker=none", "run.dir=run", "log.interval_steps=1"]
    run_python(extended, "-m", "train", *new, *small, *records)
    lines = (extended / "run/metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("weight_norm", 0) > 0 for line in lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the format applied to the source, and files to read."""
    section = section_of("extending.md", "A dataset format: two files")
    copy_with_diffs(section, ["data"], tmp_path)
    for name, pack in (("plain", False), ("packed", True)):
        (tmp_path / name).mkdir()
        text = "".join(f">sequence {n}\n{'ACGT' * 99}\n" for n in range(20_000))
        (tmp_path / name / "a.fasta").write_text(text)
        if pack:
            subprocess.run(["gzip", "a.fasta"], cwd=tmp_path / name, check=True)
    return tmp_path


def test_a_reader_from_the_guide_reads_each_record_once(folder: Path):
    """The plain file has 8 MB, which are two units if a format can be split."""
    run_python(folder, "-c", READ)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with the loss applied to the source."""
    section = section_of("extending.md", "A loss of a token: one file, one line")
    copy_with_diffs(section, SOURCE, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_loss_from_the_guide_has_the_gradient_of_its_formula(source: Path):
    run_python(source, "-c", COMPARE_GRADIENTS)


@pytest.mark.slow
def test_the_loss_from_the_guide_trains_and_does_not_depend_on_the_mesh(source: Path):
    mesh = ["model=llama_nano", "mesh.fsdp=2", "mesh.tensor=2", "mesh.context=2"]
    mesh += ["model.num_layers=1"]
    run_python(source, "-m", "train.prove", *mesh)
    # With a head of zeros, all 257 tokens have the same probability.
    run = ["model.init=zero", "runtime.cpu_devices=8", "tracker=none", "run.dir=run"]
    run += ["data.batch_size=4", "data.sequence_length=64", "log.interval_steps=1"]
    run += ["train.num_steps=3", "eval.num_batches=1", "eval.final_num_batches=1"]
    run_python(source, "-m", "train", *mesh, *run)
    lines = (source / "run/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(math.log(257), rel=1e-4)  # nats, not the loss


@pytest.fixture
def with_mixer(tmp_path: Path) -> Path:
    """Return a folder with the mixer applied to the source."""
    copy_with_diffs((GUIDES / "adding-a-model.md").read_text(), SOURCE, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_mixer_from_the_guide_has_a_cache_that_changes_nothing(with_mixer: Path):
    run_python(with_mixer, "-c", COMPARE_CACHED)


@pytest.mark.slow
def test_the_mixer_from_the_guide_trains_on_a_mesh_and_is_sampled(with_mixer: Path):
    section = section_of("adding-a-model.md", "Try it")
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    prove, train, sample = commands.replace("\\\n", "").splitlines()
    short = ["train.num_steps=20", "data.batch_size=4", "data.sequence_length=64"]
    short += ["eval.final_num_batches=1", "tracker=none"]
    for command, more in ((prove, []), (train, short), (sample, [])):
        run_python(with_mixer, *command.split()[1:], *more)
