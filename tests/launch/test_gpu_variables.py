import os
import subprocess
import sys

from launch import gpu_variables as gpu

XLA = "import jax; jax.devices()"


def test_flags_are_known_to_this_xla():
    """XLA ends the program at an unknown flag."""
    env = {**os.environ, "XLA_FLAGS": gpu.job_variables({})["XLA_FLAGS"]}
    subprocess.run([sys.executable, "-c", XLA], env=env, check=True, timeout=120)


def test_either_name_of_the_memory_fraction_replaces_the_default():
    assert "XLA_CLIENT_MEM_FRACTION" in gpu.job_variables({})
    old = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    assert "XLA_CLIENT_MEM_FRACTION" not in gpu.job_variables(old)
    assert gpu.job_variables({"NCCL_DEBUG": "INFO"})["NCCL_DEBUG"] == "INFO"
