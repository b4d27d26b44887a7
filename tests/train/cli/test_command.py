"""The command line as its users meet it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fleet import REPOSITORY
from train.cli.command import run_command
from train.cli.rules import must_name_run
from train.evaluate.__main__ import EvaluateConfig
from train.sample.__main__ import SampleConfig

PROGRAM = """
import os, sys
from train.cli.command import run_command, to_yaml
from train.config import Config
from train.errors import ConfigError, Mistake
from data.errors import DataError

def main(config: Config) -> int:
    if config.seed == 65:
        raise DataError("/corpus is damaged; prepare it again")
    if config.seed == 78:
        raise ConfigError([Mistake("mesh.fsdp", 3, "must divide 8")])
    if config.seed == 1:
        raise RuntimeError("a crash")
    if config.seed == 6:
        os.abort()
    if config.seed == 9:
        sys.exit(9)
    print("seed", config.seed, "pid", os.getpid())
    print(to_yaml(config))
    return 42 if config.seed == 42 else 0

if __name__ == "__main__":
    run_command(main, "train", outcome=lambda config: ("runs/x", 1.5))
"""
Result = subprocess.CompletedProcess[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Work in an empty folder; afterwards that must be empty still."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path
    assert list((tmp_path / "here").iterdir()) == []


@pytest.fixture
def process(here: Path) -> Callable[..., Result]:
    """Run the program in a process of its own."""
    (here / "code").mkdir()
    (here / "code" / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(REPOSITORY), str(here / "code")])
    return lambda *arguments: subprocess.run(
        [sys.executable, "-m", "program", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def run(here: Path, monkeypatch, capsys) -> Callable[..., Result]:
    """Run the program, or another command, in this process."""
    program = dict[str, Any](__name__="program")
    exec(PROGRAM, program)

    def ended(*arguments: str, of: tuple[Any, ...] = (program["main"],)) -> Result:
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit) as exit_:
            run_command(*of)
        code = exit_.value.code or 0
        assert isinstance(code, int)
        return Result([], code, *capsys.readouterr())

    return ended


def entry(result: subprocess.CompletedProcess[str], title: str) -> str:
    """Return the text under one mistake of the list."""
    assert result.returncode == 78
    assert "Traceback" not in result.stderr
    blocks = result.stderr.split("\n\n  ")
    (block,) = [block for block in blocks if block.splitlines()[0] == title]
    return block.partition("\n")[2]


def test_all_mistakes_at_once(run):
    result = run(
        "model.num_hedas=8",
        "optimizer.learning_rate=fast",
        "train.num_steps=1.5",
        "mesh=fdsp",
        "model.norm=batch",
        "+train.new=1",
        "+seed=1",
        "~log.interval_steps",
        "~mesh.params.bar",
        "mesh.params.foo=fsdp",
        "train=3",
        "train.remat={a: 1}",
        "eval.interval_steps=[1",
        "eval",
        "data.batch_size=1,2",
        "hydra.foo=1",
        "--bogus",
        "--cfgg=job",
        "checkpoint.keep_latest=0",
        "runtime.cpu_devices=-2",
    )
    assert result.stdout == ""
    assert result.stderr.startswith("20 mistakes")
    assert "did you mean model.num_heads?" in entry(result, "model.num_hedas = 8")
    assert "must be a number" in entry(result, "optimizer.learning_rate = fast")
    assert "must be a whole number" in entry(result, "train.num_steps = 1.5")
    assert "auto, ddp, fsdp, fsdp_tensor" in entry(result, "mesh = fdsp")
    assert "one of layernorm, rmsnorm" in entry(result, "model.norm = batch")
    assert "no such key" in entry(result, "train.new = 1")
    assert "without the +" in entry(result, "seed = 1")
    assert "cannot be removed" in entry(result, "log.interval_steps")
    assert "no such key" in entry(result, "mesh.params.bar")
    assert "is no logical axis" in entry(result, "mesh.params.foo = fsdp")
    assert "section" in entry(result, "train = 3")
    assert "one of none, dots, full" in entry(result, "train.remat = {a: 1}")
    assert "quote" in entry(result, "eval.interval_steps = [1")
    assert "is not key=value" in entry(result, "eval")
    assert "--multirun" in entry(result, "data.batch_size = 1,2")
    assert "no such key" in entry(result, "hydra.foo = 1")
    assert "no such flag" in entry(result, "--bogus")
    assert "did you mean --cfg?" in entry(result, "--cfgg=job")
    assert "at least 1" in entry(result, "checkpoint.keep_latest = 0")
    assert "at least 1" in entry(result, "runtime.cpu_devices = -2")


@pytest.mark.parametrize(
    "typed",
    [
        ("data.batch_size = 3",),
        ("data.batch_size =3",),
        ("data.batch_size", "=", "3"),
        ("data.batch_size", "=3"),
        ("data.batch_size=", "3"),
    ],
)
def test_spaces_around_the_sign_are_named(run, typed: tuple[str, ...]):
    result = run("--cfg", "job", *typed, "seed=x")
    assert "type data.batch_size=3" in entry(result, "data.batch_size = 3")
    assert "must be a whole number" in entry(result, "seed = x")
    assert result.stderr.startswith("2 mistakes")


def test_values_are_shown_as_they_are_typed(run):
    result = run("profile.steps=[9]", "optimizer=lion", "optimizer.offload=true")
    assert "ascending" in entry(result, "profile.steps = [9]")
    assert "must be false" in entry(result, "optimizer.offload = true")


def test_null_takes_the_place_of_a_presets_list_where_it_may(run):
    typed = ("model=gemma2_nano", "model.layer_pattern=null", "profile.steps=null")
    result = run(*typed)
    assert "must be a list" in entry(result, "profile.steps = null")
    assert result.stderr.startswith("1 mistake ")


def test_a_rule_does_not_speak_of_the_default_of_a_mistaken_key(run):
    result = run("data=txt", "data.path=x", "data.batch_size=four", "seed=0")
    assert result.stderr.startswith("2 mistakes")
    assert "must be one of mixture, python, text, tokens" in entry(result, "data = txt")
    result = run("model.num_hedas=5", "model.embed_dim=130")
    assert result.stderr.startswith("1 mistake ")


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        ("keys", "seed: x\noptimizer: {lr: 3, name: sgd}", ["seed", "optimizer.lr"]),
        ("choice", "defaults: [{override /data: txt}]\nseed: 1", ["experiment"]),
        ("yaml", "seed: [1", ["experiment"]),
        ("rules", "seed: 1\nmodel: {num_heads: 3}", ["model.embed_dim"]),
    ],
)
def test_a_preset_is_checked_too(run, tmp_path, name: str, text: str, keys: list[str]):
    folder = tmp_path / "presets" / "experiment"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    result = run("--config-dir", str(folder.parent), f"experiment={name}", "seeed=1")
    assert result.returncode == 78
    assert "Traceback" not in result.stderr
    assert "seeed = 1" in result.stderr
    for key in keys:
        assert f"  {key} = " in result.stderr
    if name == "keys":
        assert f"in {folder}/keys.yaml" in result.stderr
        assert "one of adamw, muon, adafactor, lion" in result.stderr


def test_a_preset_of_the_users_own_runs(run, process, tmp_path):
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


def test_the_command_line_has_the_last_word(run):
    result = run("experiment=shakespeare_cpu", "data.path=x.txt", "model.num_layers=2")
    assert result.returncode == 0
    assert "num_layers: 2\n" in result.stdout
    assert "learning_rate: 0.001\n" in result.stdout
    result = run("+mesh.activations.layers=null", "~mesh.params.vocab", "run.name=5")
    assert result.returncode == 0
    assert "name: '5'" in result.stdout
    assert result.stdout.count("vocab: tensor") == 1  # of activations


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
    result = run("--cfg", "job", "train.num_steps=7")  # below the warm-up: only shown
    assert result.returncode == 0
    assert "pid" not in result.stdout
    for line in ("accumulation_steps: 1", "tokenizer_sha256: null", "num_steps: 7"):
        assert f"  {line}\n" in result.stdout
    assert run("--cfg", "job", "train.num_step=7").returncode == 78
    result = run("--cfg", "job", "train.accumulation_steps=3")
    assert "divisible by train.accumulation_steps" in entry(
        result, "data.batch_size = 8"
    )
    assert "accumulation_steps: 3\n" in result.stdout
    result = run("--cfg", "jobb", "train.num_step=7")
    assert "must be one of job, hydra, all" in entry(result, "--cfg = jobb")
    assert "no such key" in entry(result, "train.num_step = 7")


def test_help_is_short_and_says_what_one_needs(run):
    result = run("--help")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) < 40
    for text in ("python -m train ", "mesh: auto, ddp", "78 the config", "--multirun"):
        assert text in result.stdout
    assert "Hydra is" not in result.stdout


def test_a_sweep_runs_each_job_in_its_own_process_and_survives_failures(process):
    result = process("--multirun", "seed=0,9,6,2", "log.interval_steps=3")
    assert result.returncode == 9
    lines = [x.split() for x in result.stdout.splitlines() if x.startswith("seed 2 ")]
    lines += [x.split() for x in result.stdout.splitlines() if x.startswith("seed 0 ")]
    assert len(lines) == 2
    assert lines[0][3] != lines[1][3]
    assert "exit code 134" in result.stderr
    assert result.stdout.count("interval_steps: 3") == 2
    table = [
        line.split() for line in result.stdout.partition("\nsweep\n")[2].splitlines()
    ]
    assert table[2:] == [
        ["0", "seed=0", "0", "1.5000", "runs/x"],
        ["1", "seed=9", "9", "-", "runs/x"],
        ["2", "seed=6", "134", "-", "runs/x"],
        ["3", "seed=2", "0", "1.5000", "runs/x"],
    ]


def test_each_value_of_a_sweep_is_checked_before_the_first_job(run):
    result = run("log.interval_steps=3", "-m", "seed=1,x", "model=gpt_nano,gpt3")
    assert result.stdout == ""
    assert "whole number" in entry(result, "seed = x")
    assert "gpt_nano" in entry(result, "model = gpt3")
    result = run("-m", "data.batch_size=8,16", "train.accumulation_steps=1,16")
    assert "accumulation_steps=16" in entry(result, "data.batch_size = 8")
    assert result.stderr.startswith("1 mistake ")


@pytest.mark.parametrize(
    ("name", "schema", "right", "wrong"),
    [
        ("evaluate", EvaluateConfig, ["run.dir=r", "step=3"], ["model=gpt_nano"]),
        ("sample", SampleConfig, ["run.name=r", "prompt='a b'"], ["top_k=x"]),
    ],
)
def test_commands_on_a_run(run, name, schema, right, wrong):
    of = (print, name, schema, must_name_run)
    result = run(*right, of=of)
    assert result.returncode == 0
    assert result.stdout.startswith(schema.__name__)
    assert f"python -m train.{name}" in run("--help", of=of).stdout
    result = run(*wrong, of=of)
    assert result.returncode == 78
    assert wrong[0].partition("=")[0] in result.stderr
    assert "run.dir" in result.stderr


@pytest.mark.parametrize(
    ("module", "argument", "heavy"),
    [
        ("train", "--help", {"jax", "flax", "pydantic", "grain", "tensorstore"}),
        ("train", "train.num_step=3", {"jax", "flax", "grain", "tensorstore"}),
        ("train.status", "run.name=none", {"jax", "flax", "grain"}),
        ("launch", "cluster=slrm", {"jax", "flax", "grain", "tensorstore"}),
    ],
)
def test_help_mistakes_and_status_are_cheap(tmp_path, module, argument, heavy):
    code = (
        "import atexit, runpy, sys\n"
        f"sys.argv = ['{module}', '{argument}']\n"
        "atexit.register(lambda: print(*{x.partition('.')[0] for x in sys.modules}))\n"
        f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 78), result.stderr
    loaded = set(result.stdout.splitlines()[-1].split())
    assert "hydra" in loaded
    assert loaded & heavy == set()


def test_what_does_not_fit_the_devices_comes_with_all_else(run, monkeypatch):
    sizes = ("mesh.fsdp=3", "data.batch_size=7", "runtime.cpu_devices=8")
    result = run(*sizes, "model.num_hedas=3")
    assert result.stderr.startswith("4 mistakes")
    assert "multiply to the 8 devices" in result.stderr
    # In the order typed, then of the config.
    starts = [
        line.split()[0] for line in result.stderr.splitlines() if line[:3] == "  m"
    ]
    assert starts == ["mesh", "model.num_hedas", "mesh.params.embed"]
    assert "nearest: 6 or 9" in entry(result, "data.batch_size = 7")
    monkeypatch.setenv("SLURM_NTASKS", "2")  # so many that one does not know
    result = run(*sizes, "mesh.tensor=8", "model.num_hedas=3")
    assert result.stderr.startswith("4 mistakes")
    assert "nearest: 6 or 9" in entry(result, "data.batch_size = 7")
    assert "num_kv_heads=4 on 8" in entry(result, "mesh.params.kv_heads = tensor")


def test_habits_of_other_programs_are_answered(run):
    result = run("--num_steps=30", "resume=true", "data.tokenizer=gpt3")
    assert "train.num_steps=30?" in entry(result, "--num_steps=30")
    assert "the same command continues a run" in entry(result, "resume = true")
    assert "did you mean gpt2?" in entry(result, "data.tokenizer = gpt3")


def test_a_mistake_says_what_the_key_means_and_a_batch_has_its_old_name(run):
    result = run("train.num_steps=0", "data.skip_steps=[3,1]", "train.remat=[mlp_upp]")
    assert "or a list of query, key, value, " in entry(
        result, "train.remat = [mlp_upp]"
    )
    assert "(Updates of the whole run" in entry(result, "train.num_steps = 0")
    assert "must be pairs" in entry(result, "data.skip_batches = [3,1]")
    shown = run("data.skip_steps=[1,3]", "--cfg", "job")
    assert yaml.safe_load(shown.stdout)["data"]["skip_batches"] == [1, 3]


def test_several_trackers_are_chosen_at_once(run):
    def enabled(*arguments: str) -> dict[str, bool]:
        shown = yaml.safe_load(run(*arguments, "--cfg", "job").stdout)
        return {name: it["enabled"] for name, it in shown["tracker"].items()}

    only = dict.fromkeys(("wandb", "tensorboard", "mlflow"), False)
    assert enabled() == only | {"wandb": True}
    assert enabled("tracker=none") == enabled("tracker.name=none") == only
    assert enabled("tracker=tensorboard") == only | {"tensorboard": True}
    both = enabled("tracker=[mlflow,wandb]", "tracker.wandb.project=x")
    assert both == only | {"mlflow": True, "wandb": True}
    shown = run("tracker.project=mine", "tracker.mode=online", "--cfg", "job").stdout
    wandb = {"enabled": True, "project": "mine", "mode": "online"}
    assert yaml.safe_load(shown)["tracker"]["wandb"] == wandb


def test_a_tracker_that_is_none_is_named(run):
    result = run("tracker=[wandb,tensorbord]", "tracker.mode=on")
    listed = entry(result, "tracker = [wandb,tensorbord]")
    assert "did you mean tensorboard?" in listed
    assert "must be offline or online" in entry(result, "tracker.wandb.mode = on")
    result = run("tracker=[none,wandb]")
    assert "none stands alone" in entry(result, "tracker = [none,wandb]")


def test_mistakes_in_a_table_of_sections_hide_no_others(run):
    result = run("data=mixture", "data.sources={web: {pathh: 1}, b: 3}", "seed=x")
    assert "did you mean data.sources.web.path" in result.stderr
    assert "section" in entry(result, "data.sources.b = 3")
    assert "whole number" in entry(result, "seed = x")


def test_hydra_and_omegaconf_stay_where_they_belong():
    for package in ("train", "model", "data"):
        for path in (REPOSITORY / package).rglob("*.py"):
            text = path.read_text()
            mentions = "omegaconf" in text or "import hydra" in text
            assert not mentions or path.parent.name == "cli", path


def test_a_table_of_sections_is_set_as_a_whole(run):
    sources = "data.sources={web: {path: a, weight: 0.8}, code: {path: b, epochs: 4}}"
    change = "data.weight_changes=[{step: 9, weights: {web: 1}}]"
    shown = run("data=mixture", sources, change, "--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    config = yaml.safe_load(shown.stdout)["data"]
    assert config["sources"]["web"] == {"path": "a", "weight": 0.8, "epochs": None}
    assert config["sources"]["code"] == {"path": "b", "weight": 1.0, "epochs": 4.0}
    assert config["weight_changes"] == [{"step": 9, "weights": {"web": 1.0}}]
    wrong = run("data=mixture", "data.sources={web: {path: a, weights: 2, epochs: x}}")
    assert wrong.returncode == 78
    assert "did you mean data.sources.web.weight" in entry(
        wrong, "data.sources.web.weights = 2"
    )
    assert "must be a number, or null" in entry(wrong, "data.sources.web.epochs = x")
    assert wrong.stderr.startswith("2 mistakes")
    single = run("data=mixture", "data.sources.web.path=a", "--cfg", "job")
    assert yaml.safe_load(single.stdout)["data"]["sources"]["web"]["path"] == "a"
