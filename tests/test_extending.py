"""What the guides add to the source works as it stands there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from data.program import PACKAGES
from tests.fleet import REPOSITORY
from tests.program import SOURCE_TREE

pytestmark = SOURCE_TREE

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
SOURCE = PACKAGES


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


@pytest.mark.slow
def test_a_tree_with_these_diffs_trains(extended: Path):
    new = ["model.activation=silu", "model.mixer=convolution"]
    small = ["model.num_layers=1", "data.batch_size=2", "train.num_steps=3"]
    small += ["eval.num_batches=1", "eval.final_num_batches=1"]
    records = ["tracker=none", "run.dir=run", "log.interval_steps=1"]
    run_python(extended, "-m", "train", *new, *small, *records)


def test_the_diffs_of_the_guides_apply_together(extended: Path):
    added = (
        ("model/layers.py", "Activation.silu"),
        ("model/mixer_catalog.py", "CONVOLUTION"),
    )
    for path, text in added:
        assert text in (extended / path).read_text()


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
