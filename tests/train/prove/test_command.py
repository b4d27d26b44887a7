"""`python -m train.prove` prints and records its result, and exits with a code."""

import json

import pytest

from tests.program import module_option, program_code

SMALL = (
    *("model.num_layers=2", "model.num_heads=2", "tracker=none", "train.num_steps=2"),
    *("data.sequence_length=32", "data.batch_size=8", "optimizer=adamw"),
    *("eval.final_num_batches=1", "run.dir=run"),
)
# This program plants a fault before the command runs.
BROKEN = """
import runpy, sys
from pytest import MonkeyPatch
from data.program import PREFIX
from tests.train.prove.mutations import MUTATIONS

module, name, *sys.argv[1:] = sys.argv[1:]
next(m for m in MUTATIONS if m.name == name).patch(MonkeyPatch())
runpy.run_module(PREFIX + module, run_name="__main__", alter_sys=True)
"""
BROKEN_KERNEL = """
import runpy, sys
from data.program import PREFIX
from model.attention import xla

attend = xla.attend_masked
calls = []

def wrong(*operands, **options):
    calls.append(operands)
    attended = attend(*operands, **options)
    factor = 2 if len(calls) == 1 else 1
    return attended._replace(o_BTNV=attended.o_BTNV * factor)

xla.attend_masked = wrong
runpy.run_module(PREFIX + "train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_proved_mesh_is_recorded_and_the_run_starts_there(forks, tmp_path):
    overrides = *SMALL, "mesh.fsdp=-1", "runtime.prove_kernels=true"
    result = forks.run([*module_option("train.prove"), *overrides], tmp_path)
    assert result.returncode == 0, result.stderr
    last_line = result.stdout.splitlines()[-1]
    assert (
        last_line == "proved      The steps on the mesh fsdp 2 are those of one device."
    )
    record = json.loads((tmp_path / "run/prove.json").read_text())
    assert record["proved"]
    assert record["mesh"] == {"fsdp": 2}
    assert record["changed"]["mesh.fsdp"] == [-1, 2]
    assert record["compared"] > 50
    assert {"jax", "code"} <= record["versions"].keys()
    assert {"loss", "gradient"} <= {entry["quantity"] for entry in record["largest"]}
    result = forks.run([*module_option("train"), *overrides], tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_fault_ends_with_exit_code_5_and_is_located(forks, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(program_code(BROKEN))
    command = str(program), "train.prove", "no sum of tables"
    overrides = *SMALL, "mesh.data=2", "mesh.fsdp=2"
    result = forks.run([*command, *overrides], tmp_path)
    assert result.returncode == 5, result.stderr
    *_, difference, cause = result.stdout.splitlines()
    mesh = "not proved  The first difference on the mesh data 2 x fsdp 2"
    assert difference.startswith(f"{mesh}: gradient embedding.weight: ")
    assert cause == "cause       data"
    result = forks.run([*command, *overrides, "json=true"], tmp_path)
    assert result.returncode == 5
    record = json.loads(result.stdout)
    assert record == json.loads((tmp_path / "run/prove.json").read_text())
    assert not record["proved"]
    assert record["cause"] == ["data"]
    assert record["differences"][0]["name"] == "embedding.weight"


@pytest.mark.slow
def test_a_run_does_not_start_with_a_wrong_kernel(forks, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(program_code(BROKEN_KERNEL))
    command = [str(program), *SMALL, "runtime.prove_kernels=true"]
    result = forks.run(command, tmp_path)
    assert result.returncode == 5, result.stderr
    assert "xla attention, window none: result" in result.stderr


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("mesh=planned", "has no sizes of mesh axes yet"),
        ("mesh=single", "has only one device"),
        ("mesh.tensor=3", "puts model.num_heads=2 on 3 devices"),
    ],
)
def test_nothing_to_compare_is_a_mistake(forks, tmp_path, word, text):
    result = forks.run([*module_option("train.prove"), *SMALL, word], tmp_path)
    assert result.returncode == 78, result.stderr
    assert text in result.stderr
    assert not (tmp_path / "run").exists()
