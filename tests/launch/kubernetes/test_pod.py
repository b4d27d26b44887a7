"""Pods of `cluster=gke_tpu` and `cluster=gke_gpu`, run as processes here."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch.job import Job
from tests.fleet import REPOSITORY, TINY, free_port
from tests.launch.controllers import Pod
from tests.launch.hostile import VALUES, argument_printer, printed
from tests.launch.kinds import GPU, JOB, TPU, manifest
from train.cli.quoting import hydra_text

TIMEOUT_S = 600  # enough for four processes on a busy machine


@pytest.mark.parametrize("cluster", [TPU, GPU, replace(GPU, processes_per_node=8)])
def test_hostile_values_arrive(cluster, tmp_path):
    """Each value is one argument of training, whatever the kubelet expands."""
    overrides = tuple(hydra_text("tracker.wandb.project", value) for value in VALUES)
    job = replace(JOB, overrides=overrides, environment={"V": "$(HOME) $$ $A"})
    pod = Pod(manifest(cluster, job))
    pod.variables |= {"POD_NAME": "gone", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    argument_printer(tmp_path)
    subprocess.run(pod.command, env=pod.variables, check=True)
    (arguments,) = printed(tmp_path)
    assert tuple(arguments[-len(overrides) :]) == overrides
    assert arguments[-len(overrides) - 1] == "train"
    assert pod.variables["V"] == "$(HOME) $$ $A"


def train_on_pods(
    pods: list[Pod], injected: Callable[[int], dict[str, str]], expected: int
) -> None:
    """Start the pods' processes here, and check that they are one run."""
    pod_processes = []
    for number, pod in enumerate(pods):
        variables = {
            name: value.replace(pods[0].hostname, "localhost")
            for name, value in pod.variables.items()
        }
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        env |= {**variables, **injected(number)}
        pod_processes.append(
            subprocess.Popen(
                pod.command, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT
            )
        )
    try:
        output = "\n".join(
            process.communicate(timeout=TIMEOUT_S)[0] for process in pod_processes
        )
    finally:
        for process in pod_processes:
            process.kill()
    assert {process.returncode for process in pod_processes} == {0}, output
    assert output.count(f"devices     {expected} x cpu") == 1, output
    assert output.count("finished    6 steps") == 1, output


def tiny_job(folder: Path) -> Job:
    source = Path(yaml.__file__).parent.joinpath("scanner.py").read_text()
    (folder / "text.txt").write_text(source)
    data = (f"data.path={folder}/text.txt", f"data.cache_dir={folder}/cache")
    overrides = (*TINY, *data, "train.num_steps=6", f"run.dir={folder}/run")
    return replace(JOB, overrides=overrides)


@pytest.mark.slow
def test_pods_of_two_slices_find_each_other(tmp_path):
    """Each pod has the variables that GKE's webhook gives to pods with TPUs."""
    document = manifest(replace(TPU, target="v4-16x2"), tiny_job(tmp_path))
    pods = [Pod(document, job, index) for job in (0, 1) for index in (0, 1)]
    port = str(free_port())

    def injected(number: int) -> dict[str, str]:
        return {
            "TPU_WORKER_HOSTNAMES": "localhost,127.0.0.1",
            "TPU_WORKER_ID": pods[number].variables["JOB_COMPLETION_INDEX"],
            "JAX_FORCE_TPU_INIT": "1",  # otherwise JAX looks for chips first
            "JAX_COORDINATOR_PORT": port,
        }

    train_on_pods(pods, injected, 4)


@pytest.mark.slow
def test_a_single_tpu_host_trains_alone(tmp_path):
    document = manifest(replace(TPU, target="v5e-8"), tiny_job(tmp_path))
    train_on_pods([Pod(document)], lambda number: {}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_pods_of_nodes_find_each_other(tmp_path, processes):
    cluster = replace(GPU, gpus_per_node=2, processes_per_node=processes)
    document = manifest(cluster, tiny_job(tmp_path))
    pods = [Pod(document, 0, index) for index in (0, 1)]
    port = {"MASTER_PORT": str(free_port())}
    train_on_pods(pods, lambda number: port, 2 * processes)
