"""The place of a process comes from the config, the environment or JAX."""

import os

import pytest

from train.config import DistributedConfig
from train.distributed import detection
from train.distributed.detection import ProcessPlace, find_place
from train.errors import ABORTED, ConfigError, Exit

TORCHRUN = {"MASTER_ADDR": "h0", "WORLD_SIZE": "4", "RANK": "2"}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NODE_RANK": "1",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables by which this machine's own launcher may be detected."""
    prefixes = ("SLURM_", "OMPI_", "SKYPILOT_", "KUBERNETES_", "TPU_", "MEGASCALE_")
    variables = {*TORCHRUN, "MASTER_PORT", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"}
    for name in [n for n in os.environ if n.startswith(prefixes) or n in variables]:
        monkeypatch.delenv(name)


def place_with(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **keys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return find_place(DistributedConfig(**keys))


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (TORCHRUN, ProcessPlace("h0:29500", 4, 2, None)),
        (TORCHRUN | {"MASTER_PORT": "99"}, ProcessPlace("h0:99", 4, 2, None)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            ProcessPlace("h0:29500", 4, 2, 0),
        ),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            ProcessPlace("h0:29500", 4, 2, None),
        ),
        # torchrun keeps its own store on that port.
        (
            TORCHRUN | {"MASTER_PORT": "99", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ProcessPlace("h0:100", 4, 2, None),
        ),
        (SKYPILOT, ProcessPlace("10.0.0.5:29500", 3, 1, None)),
        (
            SKYPILOT | {"JAX_COORDINATOR_PORT": "9"},
            ProcessPlace("10.0.0.5:9", 3, 1, None),
        ),
        (SLURM, ProcessPlace("n0:61447", 4, 3, 1)),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"},
            ProcessPlace("n0:61447", 4, 3, None),
        ),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, ProcessPlace("n0:61447", 4, 3, None)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "5"}, ProcessPlace("n0:61447", 4, 3, None)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "5,6"}, ProcessPlace("n0:61447", 4, 3, 1)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "h:1"}, ProcessPlace("h:1", 4, 3, 1)),
        (SLURM | TORCHRUN, ProcessPlace("h0:29500", 4, 2, None)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook
    ],
)
def test_variables_are_understood(monkeypatch, variables, found):
    assert place_with(monkeypatch, variables) == found


def test_keys_override_variables_and_one_process_is_alone(monkeypatch):
    assert place_with(monkeypatch, SLURM, num_processes=1) is None
    keys = {"coordinator_address": "h:1", "num_processes": 9, "process_id": 8}
    assert place_with(monkeypatch, TORCHRUN, **keys) == ProcessPlace("h:1", 9, 8, None)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"},  # salloc
        # salloc may run its shell as a step.
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_a_shell_in_a_slurm_job_is_alone_and_says_so(monkeypatch, caplog, variables):
    assert place_with(monkeypatch, variables) is None
    assert "srun python -m train" in caplog.text


@pytest.mark.parametrize(
    ("variables", "keys", "said"),
    [
        (TORCHRUN | {"RANK": "5"}, {}, "must be below distributed.num_processes=4"),
        (TORCHRUN | {"RANK": "x"}, {}, "RANK = x"),
        (TORCHRUN | {"MASTER_ADDR": ""}, {}, "must be host:port"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR is not set"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, {}, "distributed.process_id = null"),
        ({}, {"num_processes": 2}, "distributed.coordinator_address = null"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"},
            {},
            "pip install 'jax[k8s]'",
        ),
    ],
)
def test_incomplete_or_wrong_settings_are_refused(monkeypatch, variables, keys, said):
    with pytest.raises(ConfigError) as error:
        place_with(monkeypatch, variables, **keys)
    assert said in str(error.value)


def test_a_service_that_does_not_answer_is_worth_a_retry(monkeypatch):
    def fail(*_):
        raise ConnectionError("no route to the metadata server")

    monkeypatch.setattr(detection, "detect_place", fail)
    with pytest.raises(Exit, match="no route to") as error:
        place_with(monkeypatch, {})
    assert error.value.code == ABORTED
    assert "distributed.num_processes=1" in str(error.value)
