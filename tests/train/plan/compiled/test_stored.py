"""The stored texts are those that the compiler writes today."""

import gzip
import importlib.util

import pytest

from tests.train.compiled import KEPT, STEPS, STORE, compile_steps, read_step
from train.plan.compiled.collectives import sum_collectives
from train.plan.compiled.flops import count_flops


def test_each_step_is_stored_and_no_other():
    assert {path.name for path in STORE.iterdir()} == {
        *(f"{name}.txt.gz" for name in (*STEPS, *KEPT)),
        "memory.json",
    }


@pytest.fixture(scope="module")
def renewed(tmp_path_factory):
    """Compile all stored steps again."""
    folder = tmp_path_factory.mktemp("hlo")
    return folder, compile_steps([*STEPS], folder)


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs pip install -e '.[plan]'"
)
@pytest.mark.parametrize("name", STEPS)
def test_a_stored_step_is_what_is_compiled_today(stored_step, renewed, name):
    """A plan reads the same from both. If not, run `python -m tests.train.compiled`."""
    folder, memory = renewed
    stored = stored_step(name)
    text = gzip.decompress((folder / f"{name}.txt.gz").read_bytes()).decode()
    compiled = read_step(stored.program, text)
    assert count_flops(compiled.module.executed) == count_flops(stored.module.executed)
    assert sum_collectives(compiled.collectives, by_use=True) == sum_collectives(
        stored.collectives, by_use=True
    )
    kinds = memory[name].keys() - {"generated_code"}  # It differs by environment.
    assert {k: memory[name][k] for k in kinds} == {k: stored.memory[k] for k in kinds}
