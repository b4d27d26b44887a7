"""A state with values that are not finite is not saved."""

from pathlib import Path

import pytest

from tests.fleet import TINY, of_text, write_text

# The door, with a fault that no step sees: a moment overflows after step 7.
POISONED = """
from train.__main__ import main
from train.cli.command import run_command
from train.loop import FaultInjection

def after(faults, step, state, program):
    if step != 7:
        return state
    import jax, jax.numpy as jnp
    optimizer = jax.tree.map(
        lambda x: x * jnp.asarray(jnp.inf, x.dtype) if x.ndim > 1 else x,
        state.optimizer,
    )
    return state._replace(optimizer=optimizer)

FaultInjection.after = after

if __name__ == "__main__":
    run_command(main)
"""


@pytest.mark.slow
def test_what_is_not_finite_is_not_saved_and_ends_the_run(forks, tmp_path: Path):
    (tmp_path / "poisoned.py").write_text(POISONED)
    text = of_text(write_text(tmp_path))
    words = [str(tmp_path / "poisoned.py"), f"run.dir={tmp_path}/run", *TINY, *text]
    ended = forks.run([*words, "train.max_skipped_steps=100"], tmp_path)
    assert ended.returncode == 3, ended.stderr
    assert "step 10 is not saved: there are values that are not finite in" in (
        ended.stderr
    )
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")}
    assert saved == {"5"}
