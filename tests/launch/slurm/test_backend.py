import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch import __main__ as door
from launch.config import SlurmCluster, schema_of
from launch.slurm import backend as slurm
from launch.slurm.script import job_script
from launch.slurm.squeue import QueuedJob
from launch.submissions import Submission
from tests.launch.hostile import VALUES
from tests.launch.kinds import SHARED as JOB
from tests.launch.launched import says
from tests.launch.slurm_stubs import Stubs
from train.cli.command import compose


def test_directives_hold_only_checked_values():
    """No known quoting carries the other values through all versions of sbatch."""
    for value in VALUES:
        texts = {"partition": value, "account": value, "qos": value}
        cluster = SlurmCluster(**texts, options={"comment": value})
        invalid_keys = {m.key for m in slurm.cluster_mistakes(cluster, "/runs/a")}
        if invalid_keys:
            all_keys = {f"cluster.{key}" for key in texts} | {"cluster.options.comment"}
            assert invalid_keys == all_keys, value
        else:
            assert not set(value) & set(" \t\r\n\a\"'\\#$`"), value
            lines = job_script(JOB, cluster).splitlines()
            assert f"#SBATCH --comment={value}" in lines


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        ({}, {"#SBATCH --mem=56G", "#SBATCH --cpus-per-task=64"}),  # 2 * 20 + 16
        (
            {"processes_per_node": 8},
            {"#SBATCH --mem=168G", "#SBATCH --cpus-per-task=8"},
        ),
        ({"memory": "0", "cpus_per_task": 3}, {"#SBATCH --mem=0"}),
    ],
)
def test_memory_and_cores_are_those_of_the_plan(keys, lines):
    cluster = SlurmCluster(gpus_per_node=8, gpu="h100", **keys)
    planned = replace(JOB, staged_bytes=20 << 30)
    text = job_script(planned, cluster)
    assert lines <= {*text.splitlines()}
    cores = next(w for w in text.splitlines() if "cpus-per-task" in w).split()[-1]
    assert f"\t{cores}\n" in text  # srun has the same cores
    assert "--mem" not in job_script(JOB, SlurmCluster(gpus_per_node=8))


def test_a_rendered_script_has_the_paths_of_submit(tmp_path):
    """Otherwise all runs of a checkout would share one file `stop`."""
    keys = ["cluster=slurm", "action=render", f"output={tmp_path}/out", "seed=7"]
    folder = tmp_path / "runs/a/launch/1"
    for number in (1, 2):
        output = says(tmp_path, [*keys, "run.name=a"])
        script = (tmp_path / "out/job.sh").read_text()
        assert f"\nstop={folder}/stop\n" in script
        first, _, commands = output.partition("\n")
        assert first.startswith("# No plan was made, because the keys of the cluster ")
        assert commands.startswith(f"mkdir -p {folder}\nsbatch --parsable ")
        assert output.endswith(f"--output={folder}/job.log {tmp_path}/out/job.sh\n")
        assert not folder.exists()
        folder.mkdir(parents=True)  # the next submission then has another folder
        folder = folder.with_name(str(number + 1))


def test_a_program_reads_the_number_of_the_job(tmp_path, monkeypatch, capsys):
    stubs = Stubs(tmp_path)
    monkeypatch.setenv("PATH", f"{stubs.bin}:{os.environ['PATH']}")
    stubs.program("sbatch", "echo '7;east'")
    arguments = ["cluster=slurm", f"run.dir={tmp_path}/run", "json=true"]
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    assert door.main(compose(arguments, "launch", schema_of("slurm"))) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["handle"]["job"], values["handle"]["cluster"]) == ("7", "east")
    assert values["command"][:2] == ["sbatch", "--parsable"]


@pytest.mark.parametrize(("signal_s", "warned"), [(120, False), (119, True)])
def test_a_signal_too_late_for_a_save_is_warned_of(
    tmp_path, monkeypatch, caplog, signal_s, warned
):
    stubs = Stubs(tmp_path)
    monkeypatch.setenv("PATH", f"{stubs.bin}:{os.environ['PATH']}")
    stubs.program("sbatch", "echo 7")
    submission = Submission(str(tmp_path / "run"), 1, "slurm", JOB.name, (), "/here")
    folder = Path(submission.folder)
    folder.mkdir(parents=True)
    job = replace(JOB, run_dir=submission.run_dir, folder=str(folder))
    job = replace(job, staged_bytes=120 * 10**9)
    cluster = SlurmCluster(signal_s=signal_s)
    assert slurm.submit(job, cluster, slurm.render(job, cluster), submission) == 0
    warning = f"Slurm leaves {signal_s} s, but a save takes about 120 s"
    assert (warning in caplog.text) is warned


def test_status_describes_a_job_in_the_queue(tmp_path, monkeypatch):
    stubs = Stubs(tmp_path)
    monkeypatch.setenv("PATH", f"{stubs.bin}:{os.environ['PATH']}")
    answer = "JobId=7 JobName=a-b JobState=PENDING Reason=Priority Partition=debug "
    answer += "StartTime=2030-01-02T03:04:05 Restarts=2 Comment=x JobState=RUNNING\n"
    (stubs.bin / "scontrol.job").write_text(answer)
    job = QueuedJob({"job": "7"})
    assert job.state() == "PENDING"
    assert job.describe() == [
        "job 7: pending, waits: Priority",
        "starts      2030-01-02T03:04:05",
        "restarts    2",
    ]
    stubs.program("scontrol", "echo 'slurm_load_jobs: Invalid job id' >&2; exit 1")
    assert job.state() is None
    assert job.describe() == ["job 7 is over, and forgotten"]
