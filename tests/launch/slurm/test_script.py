"""The job script of Slurm, executed with stubs of Slurm's commands."""

import json
import random
from pathlib import Path

import pytest

from launch import supervisor
from launch.config import SlurmCluster
from launch.job import Job, shell
from launch.policy import Verdict, backoff, judge
from launch.slurm import backend as slurm
from launch.slurm.script import job_script
from launch.supervisor import Supervisor, describe_attempts
from tests.launch.hostile import VALUES, argument_printer, printed
from tests.launch.kinds import Played
from tests.launch.slurm_stubs import SCONTROL, SRUN, Stubs
from tests.program import module_option
from train.cli.quoting import hydra_text


@pytest.fixture
def stubs(tmp_path) -> Stubs:
    return Stubs(tmp_path)


def render_script(folder: Path, tasks: int = 2, **keys) -> str:
    job = Job("a-b", str(folder), str(folder), ("x=1",), "/code", "/work")
    keys = {"python": "python", "nodes": tasks, **keys}
    return job_script(job, SlurmCluster(**keys))


MIXTURES = [
    *([[c, c] for c in (0, 1, 3, 4, 42, 65, 70, 75, 78, 130, 134, 137, 139, 143)]),
    *([0, 42], [42, 0], [134, 137], [137, 134], [134, 1], [78, 134], [134, 65]),
    *([70, 1], [139, 130], [3, 134], [75, 42], [4, 42], [255, 78], [42, 130]),
]


@pytest.mark.parametrize("codes", MIXTURES, ids=str)
def test_the_script_judges_codes_as_the_policy_does(stubs, tmp_path, codes):
    verdict, code = judge(codes)
    text = render_script(tmp_path, len(codes), backoff_s=7.0)
    assert stubs.attempt(text, codes) == code
    requeue = ["requeue 7"] * (verdict in (Verdict.again, Verdict.crashed))
    later = f"update JobId=7 StartTime=now+{backoff(1, 7.0):.0f}"
    assert stubs.told() == [*requeue, *[later] * (verdict is Verdict.crashed)]
    (line,) = (tmp_path / "attempts.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["verdict"], record["codes"]) == (verdict, codes)
    assert record["over"] == (not requeue)


def run_supervisor(attempts, max_restarts: int, folder: Path) -> tuple[int, int]:
    """Return the exit code of the supervisor and the number of attempts."""
    remaining = [list(attempt) for attempt in attempts]
    steps = [step for codes, step in attempts if judge(codes)[0] is Verdict.crashed]
    code = Supervisor(
        start=lambda: Played(remaining.pop(0)[0]),
        read_step=lambda: steps.pop(0),
        max_restarts=max_restarts,
        backoff_s=0,
        diary=folder / "supervised.jsonl",
    ).run()
    return code, len(attempts) - len(remaining)


def random_attempts(seed: int):
    """Return crashes at a few steps, mixed with interruptions that do not count."""
    rng = random.Random(seed)
    crashes = ([1], [137], [139])
    interruptions = ([42], [134], [75])
    outcomes = [
        rng.choice(crashes if rng.random() < 0.75 else interruptions) for _ in range(8)
    ]
    return [(codes, rng.choice([None, 5, 5, 5, 9])) for codes in outcomes] + [([0], 9)]


@pytest.mark.parametrize(
    ("attempts", "max_restarts"),
    [
        ([([1], 5), ([1], 5), ([1], 5), ([0], 9)], 10),
        ([([1], 0), ([42], 0), ([1], 0), ([1], 0), ([0], 9)], 10),
        ([([1], None)] * 4 + [([0], 9)], 3),
        *((random_attempts(number), 5) for number in range(6)),
    ],
)
def test_the_script_counts_restarts_as_the_supervisor_does(
    stubs, tmp_path, monkeypatch, attempts, max_restarts
):
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor, "_OWNED_PAUSE_S", 0.0)
    expected = run_supervisor(attempts, max_restarts, tmp_path)
    text = render_script(tmp_path, 1, max_restarts=max_restarts, backoff_s=0.0)
    for number, (codes, step) in enumerate(attempts, start=1):
        code = stubs.attempt(text, codes, step, SLURM_RESTART_COUNT=str(number - 1))
        if not stubs.told():
            break
    assert (code, number) == expected


NOW = "2030-01-02T03:04:05"


def test_a_killed_shell_counts_as_a_crash(stubs, tmp_path):
    assert stubs.attempt(render_script(tmp_path), [None, 134]) == 137
    assert len(stubs.told()) == 2  # requeue and delay; Slurm itself handles a lost node


@pytest.mark.parametrize(
    ("job", "codes", "told", "over"),
    [
        (("COMPLETING", "None", 1), [137, 134], [], False),  # requeued by Slurm
        (("COMPLETING", "None", 1, NOW), [42, 42], [], False),
        (("COMPLETING", "None", 0), [42, 42], [], True),  # cancelled
        (("COMPLETING", "None", 0), [0, 0], [], True),
        (("COMPLETING", "None", 0, NOW), [0, 0], [], True),
        (("COMPLETING", "None", 0, NOW), [42, 42], ["requeue 7"], False),  # preempted
        (("COMPLETING", "TimeLimit", 0), [42, 42], ["requeue 7"], False),
        (("RUNNING", "None", 0), [42, 42], ["requeue 7"], False),
    ],
)
def test_the_script_requeues_unless_slurm_has_decided(
    stubs, tmp_path, job, codes, told, over
):
    stubs.slurm_says(*job)
    code = stubs.attempt(render_script(tmp_path), codes)
    assert (code, stubs.told()) == (judge(codes)[1], told)
    (line,) = (tmp_path / "attempts.jsonl").read_text().splitlines()
    assert json.loads(line)["over"] == over
    (description,) = describe_attempts(tmp_path / "attempts.jsonl")
    assert description.endswith("the last" if over else "again")


def test_a_job_asked_to_stop_is_not_requeued(stubs, tmp_path):
    text = render_script(tmp_path)
    stubs.program("srun", f"touch {tmp_path}/stop\n{SRUN}")
    assert stubs.attempt(text, [42, 42]) == 42
    assert stubs.told() == []
    assert stubs.attempt(text, [0, 0]) == 130
    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("codes", "nodes", "excluded"),
    [
        ([134, 137], "n0 n1 n2", "n1"),
        ([1, 1], "n0 n1 n2", None),  # all nodes failed, so the program is at fault
        ([134, 137], "n0 n1", None),  # no spare node exists
        ([42, 134], "n0 n1 n2", None),
        ([134, None], "n0 n1 n2", "n1"),  # a process was killed with its shell
    ],
)
def test_a_node_that_failed_is_avoided(stubs, tmp_path, codes, nodes, excluded):
    stubs.program("sinfo", f"printf '%s\\n' {nodes} n0")
    text = render_script(tmp_path)
    more = {"SLURM_JOB_NUM_NODES": "2"}
    stubs.attempt(text, codes, SLURM_JOB_PARTITION="p", **more)
    updates = [line for line in stubs.told() if "ExcNodeList" in line]
    assert updates == [f"update JobId=7 ExcNodeList={excluded}"] * bool(excluded)
    stubs.attempt(text, [42, 42], SLURM_JOB_PARTITION="p", **more)
    updates = [line for line in stubs.told() if "ExcNodeList" in line]
    assert updates == ["update JobId=7 ExcNodeList="] * bool(excluded)


def test_a_users_choice_of_nodes_is_kept(stubs, tmp_path):
    stubs.program("sinfo", "printf '%s\\n' n0 n1 n2 n3")
    more = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "p"}
    text = render_script(tmp_path, options={"exclude": "n3"})
    stubs.attempt(text, [134, 137], **more)
    assert "update JobId=7 ExcNodeList=n3,n1" in stubs.told()
    for options in ({"exclude": "n3,n4", "constraint": "ib"}, {"nodelist": "n[0-3]"}):
        stubs.attempt(render_script(tmp_path, options=options), [134, 137], **more)
        assert not [line for line in stubs.told() if "ExcNodeList" in line]


def test_a_failed_requeue_is_reported(stubs, tmp_path):
    stubs.program("scontrol", f"[[ $1 != requeue ]] || exit 1\n{SCONTROL}")
    (stubs.bin / "python.codes").write_text("42 42")
    result = stubs.run(render_script(tmp_path))
    assert result.returncode == 42
    assert "submit it again with action=resume" in result.stderr


def test_a_signal_to_the_script_does_not_end_it(stubs, tmp_path):
    stubs.program("srun", f"kill -TERM $PPID\nsleep 0.3\nkill -CONT $PPID\n{SRUN}")
    assert stubs.attempt(render_script(tmp_path), [42, 42]) == 42
    assert stubs.told() == ["requeue 7"]


# After a requeue, Slurm reports one more restart of the job.
REQUEUED = """
[[ $1 != requeue ]] || sed -i s/Restarts=0/Restarts=1/ "$0.job"
"""
# A time limit passes: Slurm signals the script, and later kills all processes.
TIME_LIMIT = """
said=${0%/*}/scontrol
sed -i 's/RUNNING Reason=None/COMPLETING Reason=TimeLimit/' "$said.job"
kill -TERM $PPID
for ((look = 0; look < looks; look++)); do
	[[ -s $said.told ]] && break
	sleep 0.1
done
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_job_killed_during_a_long_save_is_requeued(stubs, tmp_path, killed):
    """The job is requeued before the kill, and only once if no kill was needed."""
    stubs.program("scontrol", REQUEUED + SCONTROL)
    kill = "kill -KILL $PPID; exit\n" * killed
    stubs.program("srun", f"looks=300{TIME_LIMIT}{kill}{SRUN}")
    code = stubs.attempt(render_script(tmp_path), [42, 42])
    assert (code, stubs.told()) == (-9 if killed else 42, ["requeue 7"])
    if not killed:
        (line,) = (tmp_path / "attempts.jsonl").read_text().splitlines()
        record = json.loads(line)
        assert (record["verdict"], record["over"]) == ("again", False)


def test_a_time_limit_does_not_requeue_a_job_asked_to_stop(stubs, tmp_path):
    stop = f"touch {tmp_path}/stop\nlooks=10"
    stubs.program("srun", f"{stop}{TIME_LIMIT}{SRUN}")
    assert stubs.attempt(render_script(tmp_path), [42, 42]) == 42
    assert stubs.told() == []


def test_values_arrive_verbatim(stubs, tmp_path):
    argument_printer(stubs.bin)
    folder = "/".join([str(tmp_path), *VALUES])
    overrides = tuple(hydra_text("tracker.wandb.project", value) for value in VALUES)
    variables = {f"V{number}": value for number, value in enumerate(VALUES)}
    job = Job("a-b", folder, folder, overrides, "/code", folder, variables)
    checks = [f"[[ $V{number} == {shell([v])} ]]" for number, v in enumerate(VALUES)]
    srun = "\n".join(f"{line} || exit 9" for line in checks) + SRUN
    stubs.program("srun", srun)
    script = slurm.render(job, SlurmCluster(python="python", container_image="a:b c"))
    result = stubs.run(script.files["job.sh"])
    assert result.returncode == 0, result.stderr
    assert printed(stubs.bin) == [["-P", *module_option("train"), *overrides]]
    assert (Path(folder) / "attempts.jsonl").exists()
    assert script.command[3] == f"--output={folder.replace('%', '%%')}/job.log"
    argument_printer(stubs.folder / "sbatch", "sbatch")
    stubs.bin = stubs.folder / "sbatch"
    stubs.run(shell(script.command))
    assert printed(stubs.bin) == [list(script.command[1:])]


def test_an_address_replaces_a_name_that_does_not_resolve(stubs, tmp_path):
    show = 'python() { echo "$JAX_COORDINATOR_ADDRESS"; }\nexport -f python\n'
    for first, address in (("localhost", "localhost"), ("no.such.host.", "10.0.0.7")):
        stubs.program("python", f'echo "$JAX_COORDINATOR_ADDRESS" >{tmp_path}/address')
        stubs.run(show + render_script(tmp_path, 1), first=first, SLURM_JOB_ID="24007")
        assert (tmp_path / "address").read_text() == f"{address}:20007\n"
