"""The names for programs: their signatures, and the example of the guide."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longhaul
from data.program import ROOT
from tests.fleet import REPOSITORY

SIGNATURES = {
    "batches": "(program, start=0)",
    "compose": "(overrides=(), catalog=CATALOG)",
    "evaluate": "(run, num_batches=-1)",
    "load_run": "(directory, step=None, batch_size=None, catalog=CATALOG)",
    "main": "(catalog=CATALOG)",
    "make_program": "(config, target=None)",
    "plan": "(program)",
    "sample": "(run, prompts, num_tokens=100, *, temperature=0.8, top_k=None, "
    "top_p=None, seed=0, stop=())",
}


def signature(name: str) -> str:
    """Return the names and the defaults of a function's parameters."""
    parameters = inspect.signature(getattr(longhaul, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    text = str(inspect.Signature(plain))
    return text.replace(repr(longhaul.CATALOG), "CATALOG")


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_stay(name: str):
    assert signature(name) == SIGNATURES[name]
    assert getattr(longhaul, name).__doc__


def test_all_names_are_there():
    assert {*SIGNATURES, "CATALOG", "errors"} == {*longhaul.__all__}
    assert issubclass(longhaul.errors.ConfigError, Exception)
    with pytest.raises(AttributeError):
        _ = longhaul.nothing


def test_a_command_line_with_mistakes_is_an_error():
    with pytest.raises(longhaul.errors.ConfigError) as error:
        longhaul.compose(["model.num_heads=3", "model.embed_dim=-1"])
    assert error.value.mistakes[0].key == "model.embed_dim"


@pytest.mark.slow
def test_the_example_of_the_guide_runs(tmp_path: Path):
    text = (REPOSITORY / "docs/guides/package.md").read_text()
    train, planned, use = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    run = """
import sys
from longhaul.__main__ import script
small = ["train.num_steps=3", "data.batch_size=4", "eval.final_num_batches=1"]
sys.argv[1:] = ["train", "run.name=first", "tracker=none", *small]
script()
"""
    for code in (run, train + planned + use):
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr
    step, *_ = result.stdout.split()
    assert step == "19"
