"""Users run programs, presets and sweeps through the command line."""

import re

import pytest
import yaml

from data.program import FOLDER, shown_command
from tests.train.cli.conftest import entry
from train.cli.rules import must_name_run
from train.sample.__main__ import SampleConfig


@pytest.mark.slow
def test_a_preset_of_the_user_can_be_run(run, process, tmp_path):
    folder = tmp_path / "presets" / "experiment"
    folder.mkdir(parents=True)
    text = "# @package _global_\ndefaults: [{override /model: gpt2_124m}]\nseed: 7\n"
    (folder / "mine.yaml").write_text(text)
    flag = ("--config-dir", str(folder.parent))
    result = run("experiment=mine", *flag, "log.interval_steps=3")
    assert result.returncode == 0
    assert "seed 7" in result.stdout
    assert "num_layers: 12" in result.stdout
    result = process("-m", "experiment=mine", *flag, "log.interval_steps=3,4")
    assert (result.returncode, result.stdout.count("num_layers: 12")) == (0, 2)


def test_the_command_line_overrides_presets(run):
    result = run("experiment=shakespeare_cpu", "data.path=x.txt", "model.num_layers=2")
    assert result.returncode == 0
    assert "num_layers: 2\n" in result.stdout
    assert "learning_rate: 0.001\n" in result.stdout
    additions = ("+mesh.activations.layers=null", "+mesh.params.batch=data")
    result = run(
        *additions, "~mesh.params.batch", "mesh.params.vocab=null", "run.name=5"
    )
    assert result.returncode == 0
    assert "name: '5'" in result.stdout
    assert result.stdout.count("vocab: tensor") == 1  # only activations have it
    assert "batch: data" not in result.stdout


@pytest.mark.parametrize(
    ("code", "text"), [(42, ""), (65, "/corpus is damaged"), (78, "mesh.fsdp = 3")]
)
def test_exit_codes(run, code: int, text: str):
    result = run(f"seed={code}")
    assert result.returncode == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    with pytest.raises(RuntimeError, match="a crash"):
        run("seed=1")


def test_cfg_shows_every_key_and_runs_nothing(run):
    result = run("--cfg", "job", "train.num_steps=7")  # it is below the warm-up
    assert result.returncode == 0
    assert "pid" not in result.stdout
    for line in ("accumulation_steps: 1", "tokenizer_sha256: null", "num_steps: 7"):
        assert f"  {line}\n" in result.stdout
    result = run("--cfg", "job", "train.accumulation_steps=3")
    assert "train.accumulation_steps" in entry(result, "data.batch_size = 8")
    assert "accumulation_steps: 3\n" in result.stdout
    result = run("--cfg", "jobb", "train.num_step=7")
    assert "must be one of job, hydra, all, schema" in entry(result, "--cfg = jobb")
    assert "no such key" in entry(result, "train.num_step = 7")


def test_a_sweep_runs_each_job_in_its_own_process_and_survives_failures(process):
    result = process("--multirun", "seed=0,9,6,2", "log.interval_steps=3")
    assert result.returncode == 9
    processes = re.findall(r"^seed [02] pid (\d+)$", result.stdout, re.M)
    assert len({*processes}) == 2
    assert result.stdout.count("interval_steps: 3") == 2
    table = result.stdout.partition("\nsweep\n")[2].splitlines()
    assert [line.split() for line in table][2:] == [
        ["0", "seed=0", "0", "1.5000", "runs/x"],
        ["1", "seed=9", "9", "-", "runs/x"],
        ["2", "seed=6", "134", "-", "runs/x"],
        ["3", "seed=2", "0", "1.5000", "runs/x"],
    ]


def test_commands_on_a_run(run):
    command = (print, "sample", SampleConfig, must_name_run)
    result = run("run.name=r", "prompt='a b'", command=command)
    assert result.returncode == 0
    assert result.stdout.startswith("SampleConfig")
    assert shown_command("train.sample") in run("--help", command=command).stdout
    result = run("top_k=x", "model=gpt_nano", command=command)
    assert result.returncode == 78
    for key in ("top_k", "model", "run.dir"):
        assert f"\n  {key} = " in result.stderr


def test_several_trackers_are_chosen_at_once(run):
    def enabled(*arguments: str) -> dict[str, bool]:
        config = yaml.safe_load(run(*arguments, "--cfg", "job").stdout)
        return {name: section["enabled"] for name, section in config["tracker"].items()}

    none_enabled = dict.fromkeys(("wandb", "tensorboard", "mlflow"), False)
    assert enabled() == none_enabled | {"wandb": True}
    assert enabled("tracker=none") == none_enabled
    assert enabled("tracker=tensorboard") == none_enabled | {"tensorboard": True}
    two_trackers = enabled("tracker=[mlflow,wandb]", "tracker.wandb.project=x")
    assert two_trackers == none_enabled | {"mlflow": True, "wandb": True}


def test_hydra_and_omegaconf_stay_where_they_belong():
    for package in ("train", "model", "data"):
        for path in (FOLDER / package).rglob("*.py"):
            text = path.read_text()
            mentions = "omegaconf" in text or "import hydra" in text
            assert not mentions or path.parent.name == "cli", path


def test_a_table_of_sections_is_set_as_a_whole(run):
    sources = "data.sources={web: {path: a, weight: 0.8}, code: {path: b, epochs: 4}}"
    change = "data.weight_changes=[{step: 9, weights: {web: 1}}]"
    result = run("data=mixture", sources, change, "--cfg", "job")
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load(result.stdout)["data"]
    web = config["sources"]["web"]
    code = config["sources"]["code"]
    assert web == {"path": "a", "weight": 0.8, "epochs": None, "format": "store"}
    assert code == {"path": "b", "weight": 1.0, "epochs": 4.0, "format": "store"}
    assert config["weight_changes"] == [{"step": 9, "weights": {"web": 1.0}}]
    web = "data.sources={web: {path: a, weights: 2, epochs: x}, b: 3}"
    mistakes = run("data=mixture", web)
    for title, rule in (
        ("data.sources.web.weights = 2", "did you mean data.sources.web.weight"),
        ("data.sources.web.epochs = x", "must be a number, or null"),
        ("data.sources.b = 3", "section"),
    ):
        assert rule in entry(mistakes, title)
    assert mistakes.stderr.startswith("3 mistakes")
