"""The cache of compiled programs (train/runtime.py), in processes of their own."""

import os
import subprocess
import sys

import pytest

from tests.fleet import REPOSITORY

COMPILES = """if True:
    import jax, jax.numpy as jnp
    from train.config import RuntimeConfig
    from train.runtime import set_up
    set_up(RuntimeConfig())
    print(jax.jit(lambda x: jnp.sin(x).sum())(jnp.arange(64.0)))
"""


@pytest.mark.slow
def test_a_torn_entry_of_the_cache_of_the_environment_costs_a_warning(tmp_path):
    """On clusters the cache lies in the run, and a kill may leave half a file there."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    env |= {"JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/cache"}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "always", "-c", COMPILES]
        return subprocess.run(command, env=env, text=True, capture_output=True)

    first, entries = run(), list((tmp_path / "cache").glob("*-cache"))
    assert entries, first.stderr
    again = run()
    assert "Error reading" not in again.stderr
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])
    torn = run()
    assert "Error reading persistent compilation cache entry" in torn.stderr
    assert first.stdout == again.stdout == torn.stdout != ""
