"""A repository of one's own, with the parts of the guide, from its own folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.program import ROOT
from tests.fleet import REPOSITORY

GUIDE = REPOSITORY / "docs/guides/own-parts.md"
SMALL = [
    "model.num_layers=2",
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.mixer_pattern=[gated_conv,attention]",
    "train.loss=smoothed",
    "data=text",
    "data.path=texts",
    "data.sequence_length=32",
    "data.batch_size=8",
    "log.interval_steps=1",
    "eval.final_num_batches=1",
    "eval.num_batches=1",
    "tracker=none",
]
# Starts a command of `longhaul` without the file of the guide.
SCRIPT = "from longhaul.__main__ import script; script()"
Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository: a pyproject, the file of the guide, and text to read."""
    folder = tmp_path_factory.mktemp("lab")
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (folder / "mine.py").write_text("\n\n".join(blocks))
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "lab"\nversion = "1"\ndependencies = ["longhaul"]\n'
    )
    (folder / "texts").mkdir()
    rows = [f'"What is {n} + {n}?",{2 * n}\n' for n in range(3000)]
    for name in ("sums", "more"):
        (folder / f"texts/{name}.pairs").write_text("question,answer\n" + "".join(rows))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Return a function that runs `python <file> <arguments>` in the repository."""

    def run(
        *arguments: str, file: str = "mine.py", code: int = 0, fault: str = ""
    ) -> Result:
        result = subprocess.run(
            [sys.executable, file, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LONGHAUL_DRILL": fault},
            capture_output=True,
            text=True,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result

    return run


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    lines = (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    keys = ("step", "loss", "grad_norm", "learning_rate", "weight_norm")
    return [{key: row[key] for key in keys} for row in rows if "loss" in row]


@pytest.mark.slow
def test_it_trains_on_eight_devices_and_a_killed_run_continues_bitwise(folder, run):
    mesh = ["runtime.cpu_devices=8", "mesh.fsdp=2", "mesh.tensor=2", "mesh.context=2"]
    parts = ["optimizer.name=yogi", "schedule.name=inverse_sqrt", "model.mlp=tanh"]
    parts += ["model.parts.gated_conv.taps=3", "train.parts.smoothed.smoothing=0.2"]
    words = ["train", *SMALL, *mesh, *parts, "train.num_steps=10"]
    words += ["checkpoint.save_interval_steps=4", "runtime.allow_fault_injection=true"]
    run(*words, "run.name=whole")
    run(*words, "run.name=killed", fault="crash:0:6", code=1)
    run(*words, "run.name=killed")
    assert metrics(folder, "killed") == metrics(folder, "whole")
    assert len(metrics(folder, "whole")) == 10
    assert all(row["weight_norm"] > 0 for row in metrics(folder, "whole"))


@pytest.mark.slow
def test_several_processes_read_the_format(run):
    prepared = run("data.prepare", "input=texts", "output=store", "workers=2")
    counts = re.findall(r"([\d,]+) documents", prepared.stdout)
    assert sum(int(count.replace(",", "")) for count in counts) == 6000
    assert "python mine.py train data=tokens" in prepared.stdout


@pytest.mark.slow
def test_it_is_proved_and_planned(run):
    mesh = ["mesh.fsdp=2", "mesh.tensor=2", "mesh.context=2"]
    assert "proved" in run("prove", *SMALL, *mesh, "run.name=proved").stdout
    target = ["target=v5e-8", "data.sequence_length=128", "json=true", "output=plan"]
    planned = run("plan", *SMALL, *target).stdout
    assert json.loads(planned)["fits"]


@pytest.fixture(scope="module")
def trained(folder: Path, run: Run) -> str:
    run("train", *SMALL, "train.num_steps=3", "run.name=trained")
    return "run.name=trained"


@pytest.mark.slow
def test_a_run_is_sampled_evaluated_and_shown(run, trained):
    sampled = run("sample", trained, "prompt=Q: ", "temperature=0", "num_tokens=8")
    again = run("sample", trained, "prompt=Q: ", "temperature=0", "num_tokens=8")
    assert sampled.stdout == again.stdout
    assert "evaluated   step 3" in run("evaluate", trained, "num_batches=2").stdout
    assert "python mine.py" in run("train", *SMALL, "train.num_steps=3", trained).stdout
    run("-c", SCRIPT, "status", trained, file="-P")


@pytest.mark.slow
def test_without_its_file_a_run_is_refused_with_the_file_to_use(folder, run, trained):
    shutil.copy(folder / "mine.py", folder / "other.py")
    refusals = [run("train", *SMALL, trained, file="other.py", code=78)]
    for words in (
        ["sample", trained],
        ["train", trained],
        ["branch", "from=runs/trained@3"],
    ):
        refusals.append(run("-c", SCRIPT, *words, file="-P", code=78))
    for refusal in refusals:
        assert "mine.py" in refusal.stderr
        assert "Traceback" not in refusal.stderr
    text = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(f"{text}\n# changed\n")
    assert "differs from" in run("train", *SMALL, "train.num_steps=4", trained).stderr


@pytest.mark.slow
def test_export_refuses_what_no_family_describes(run, trained):
    refusal = run("export", trained, "output=exported", code=78)
    assert "Traceback" not in refusal.stderr


@pytest.mark.slow
def test_a_type_checker_sees_no_error_in_the_file(folder):
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    words = ["pyright", "--pythonpath", sys.executable, "mine.py"]
    result = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
    assert "0 errors" in result.stdout


@pytest.mark.slow
def test_the_file_is_part_of_jobs_and_sweeps(folder, run):
    words = [*SMALL, "train.num_steps=2", "plan_first=false"]
    run("launch", "cluster=local", *words, "run.name=local")
    assert len(metrics(folder, "local")) == 2
    ssh = ["cluster=ssh", "cluster.hosts=[h]", "cluster.code=archive"]
    output = ["action=render", "output=job", "run.dir=/shared/run"]
    run("launch", *ssh, *words, *output)
    assert f"{sys.executable} -P -m mine train" in (folder / "job/run.sh").read_text()
    unpack = [sys.executable, "job/unpack.py", "job/code.tar.gz", "--"]
    command = [sys.executable, "-P", "-m", "mine", "train", *SMALL, "--cfg=job"]
    result = subprocess.run(
        [*unpack, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "gated_conv" in result.stdout
    swept = run("train", "--multirun", "seed=0,1", *SMALL, "train.num_steps=1")
    assert "runs/" in swept.stdout
    image = ["cluster=skypilot", "cluster.code=image", "cluster.image=docker:x"]
    refusal = run("launch", *image, *words, *output, code=78)
    assert "does not bring mine.py" in refusal.stderr
