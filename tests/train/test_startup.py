"""`python -m train` finds its cluster by itself, under real launchers.

These run here on one machine with CPU devices: Open MPI, Slurm (two slurmd), and the
variables of torchrun, SkyPilot, GKE and a Cloud TPU VM. A small server of the tests
stands in for the metadata server of the VM.
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY, TINY, free_port, of_text, write_text
from tests.metadata import AS_ON_A_TPU_VM, metadata_server
from tests.program import module_option

pytestmark = pytest.mark.slow

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("startup"))


def command(folder: Path, run: str, *overrides: str) -> list[str]:
    run_overrides = ("train.num_steps=6", f"run.dir={folder}/{run}")
    return [
        sys.executable,
        *module_option("train"),
        *TINY,
        *of_text(folder),
        *run_overrides,
        *overrides,
    ]


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **(variables or {})}


def start(command: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env=environment(env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for_all(*processes: subprocess.Popen) -> tuple[list[int], list[str]]:
    """Wait until all processes end; return their exit codes and outputs."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def check_one_run(count: int, codes: list[int], outputs: list[str]) -> None:
    """Check that one run used all devices, and that only its first process reports."""
    assert set(codes) == {0}, "\n".join(outputs)
    output = "\n".join(outputs)
    assert output.count(f"devices     {count} x cpu") == 1, output
    assert output.count("finished    6 steps") == 1, output


def stop_after_a_save(
    process: subprocess.Popen, run: Path, stop: Callable[[], object]
) -> str:
    """Stop a run once it has saved a step; return its output."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (run / "checkpoints/5/digests.json").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stop()
    return process.communicate(timeout=TIMEOUT_S)[0]


def check_last_save(run: Path, output: str) -> None:
    """Check that the run saved its last step, from which a restart resumes."""
    match = re.search(r"asked to stop: saved step (\d+)", output)
    assert match, output
    assert (run / f"checkpoints/{match[1]}/digests.json").exists(), output


def test_open_mpi_passes_sigusr1_on(folder):
    """The three processes that get the signal all stop after the same step."""
    if not shutil.which("mpirun"):
        pytest.skip("needs Open MPI 4 (Debian: openmpi-bin)")
    overrides = ("train.num_steps=4000", "mesh=ddp", "data.batch_size=6")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    process = start([*mpirun, *command(folder, "mpi-usr1", *overrides)])
    stop = functools.partial(process.send_signal, signal.SIGUSR1)
    output = stop_after_a_save(process, folder / "mpi-usr1", stop)
    check_last_save(folder / "mpi-usr1", output)
    assert output.count("devices     3 x cpu") == 1
    assert process.returncode == 42


def torchrun(process: int) -> dict[str, str]:
    return {"RANK": f"{process}", "LOCAL_RANK": f"{process}"}


def skypilot(process: int) -> dict[str, str]:
    return {"SKYPILOT_NODE_RANK": f"{process}"}


def gke(process: int) -> dict[str, str]:
    """Return the variables of one of two slices of two hosts in a JobSet of GKE."""
    return {
        "TPU_WORKER_ID": f"{process % 2}",
        "MEGASCALE_SLICE_ID": f"{process // 2}",
    }


@pytest.mark.parametrize(
    ("own", "count", "shared"),
    [
        (
            torchrun,
            2,
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
        ),
        (
            skypilot,
            2,
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"},
        ),
        (
            gke,
            4,
            {
                "JAX_FORCE_TPU_INIT": "1",  # otherwise JAX first looks for chips
                "TPU_WORKER_HOSTNAMES": "localhost,127.0.0.1",
                "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
                "MEGASCALE_NUM_SLICES": "2",
            },
        ),
    ],
)
def test_variables_of_launchers(folder, own, count, shared):
    shared = {**shared, "JAX_COORDINATOR_PORT": f"{free_port()}"}
    run = command(folder, own.__name__)
    processes = [start(run, {**shared, **own(process)}) for process in range(count)]
    check_one_run(count, *wait_for_all(*processes))


def test_cloud_tpu_vms(folder):
    port = {"JAX_COORDINATOR_PORT": f"{free_port()}", "JAX_FORCE_TPU_INIT": "1"}
    python, _, _, *overrides = command(folder, "vms")
    with contextlib.ExitStack() as stack:
        processes = []
        for process in range(4):
            server = stack.enter_context(metadata_server(process))
            variables = {**port, "GCE_METADATA_IP": server}
            processes.append(
                start([python, "-c", AS_ON_A_TPU_VM, *overrides], variables)
            )
        check_one_run(4, *wait_for_all(*processes))


def test_slurm(folder, slurm):
    srun = ["srun", "-N2", "-n2", *command(folder, "slurm")]
    check_one_run(2, *wait_for_all(start(srun, slurm)))


def test_slurm_stops(folder, slurm):
    run = command(folder, "slurm-stops", "train.num_steps=4000")
    process = start(["srun", "-N2", "-n2", "-J", "stops", *run], slurm)
    cancel = ["scancel", "-s", "TERM", "-n", "stops"]
    env = environment(slurm)
    stop = functools.partial(subprocess.run, cancel, check=True, env=env)
    check_last_save(
        folder / "slurm-stops", stop_after_a_save(process, folder / "slurm-stops", stop)
    )
    assert process.returncode == 42
