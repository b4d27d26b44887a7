"""Stubs of Slurm's commands and of the interpreter, for the job script."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.launch.hostile import program

# srun runs its command as `tasks` processes, and exits with the highest code.
SRUN = """
while [[ $1 == --* ]]; do
	[[ $1 != --ntasks=* ]] || tasks=${1#*=}
	shift
done
highest=0
for ((i = 0; i < tasks; i++)); do
	SLURM_PROCID=$i SLURMD_NODENAME=n$i "$@"
	code=$?
	((code <= highest)) || highest=$code
done
exit $highest
"""
# scontrol reads its answer about the job from a file, and logs its orders to another.
SCONTROL = """
case "$*" in
"show hostnames n3"*) echo n3 ;;
"show hostnames"*) echo "${first:-localhost}" ;;
"show node"*) echo "NodeName=n0 NodeAddr=10.0.0.7 NodeHostName=n0" ;;
"show job"*) cat "$0.job" ;;
*) echo "$*" >>"$0.told" ;;
esac
"""
# The interpreter ends with the code in a file; null kills its shell too.
PYTHON = """
if [[ " $* " == *"train.status "* ]]; then
	step=$(<"$0.step")
	[[ $step != null ]] && printf '{"state": "x", "step": %s, "num_steps": 9}\n' "$step"
	exit
fi
codes=($(<"$0.codes"))
code=${codes[SLURM_PROCID]}
[[ $code != null ]] || kill -9 $PPID
exit "$code"
"""


class Stubs:
    """Slurm's commands and the interpreter, in a folder for the script's PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.bin = folder / "bin"
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            self.program(name, text)
        self.slurm_says("RUNNING")

    def program(self, name: str, text: str) -> None:
        program(self.bin / name, f"#!/usr/bin/env bash\n{text}")

    def slurm_says(
        self,
        state: str,
        reason: str = "None",
        restarts: int = 0,
        preempted: str = "None",
    ) -> None:
        text = f"JobId=7 JobName=x JobState={state} Reason={reason} Dependency=(null) "
        text += f"Requeue=1 Restarts={restarts} PreemptEligibleTime=2030-01-02T03:04:05"
        text += f" PreemptTime={preempted} SuspendTime=None\n"
        (self.bin / "scontrol.job").write_text(text)

    def run(self, text: str, **more: str) -> subprocess.CompletedProcess[str]:
        orders = self.bin / "scontrol.told"
        orders.unlink(missing_ok=True)
        orders.touch()
        env = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", **more}
        return subprocess.run(
            ["bash", "-c", text], env=env, capture_output=True, text=True, timeout=60
        )

    def attempt(
        self,
        text: str,
        codes: Sequence[int | None],
        step: int | None = None,
        **more: str,
    ) -> int:
        """Run the script with processes that end with these codes; return its code."""
        (self.bin / "python.step").write_text(json.dumps(step))
        (self.bin / "python.codes").write_text(" ".join(map(json.dumps, codes)))
        return self.run(text, **more).returncode

    def told(self) -> list[str]:
        return (self.bin / "scontrol.told").read_text().splitlines()
