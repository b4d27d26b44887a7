"""Mistakes on a command line: all are listed at once, each by its key."""

import pytest

from tests.train.cli.conftest import entry


def test_all_mistakes_are_listed_at_once(run):
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
    assert "[1, 4096]" in entry(result, "runtime.cpu_devices = -2")


def test_a_whole_number_too_large_for_jax_is_a_mistake(run):
    huge = "99999999999999999999"
    keys = ("seed", "model.num_layers", "data.batch_size", "mesh.fsdp")
    result = run(*(f"{key}={huge}" for key in keys), f"profile.steps=[1,{huge}]")
    assert result.returncode == 78
    assert result.stderr.startswith("5 mistakes")
    assert "must be in [-2147483648, 4294967296)" in entry(result, f"seed = {huge}")
    assert "must be in [1, 2147483647]" in entry(result, f"data.batch_size = {huge}")


def test_null_replaces_a_list_of_a_preset_if_the_key_allows_it(run):
    overrides = ("model=gemma2_nano", "model.layer_pattern=null", "profile.steps=null")
    result = run(*overrides)
    assert "must be a list" in entry(result, "profile.steps = null")
    assert result.stderr.startswith("1 mistake ")


def test_no_rule_mentions_the_default_of_a_mistaken_key(run):
    result = run("data=txt", "data.path=x", "data.batch_size=four", "seed=0")
    assert result.stderr.startswith("2 mistakes")
    names = "must be one of llmc, megatron, mixture, nanogpt, python, text, tokens"
    assert names in entry(result, "data = txt")
    result = run("model.num_hedas=5", "model.embed_dim=132")
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


def test_each_value_of_a_sweep_is_checked_before_the_first_job(run):
    result = run("log.interval_steps=3", "-m", "seed=1,x", "model=gpt_nano,gpt3")
    assert result.stdout == ""
    assert "whole number" in entry(result, "seed = x")
    assert "gpt_nano" in entry(result, "model = gpt3")
    result = run("-m", "data.batch_size=8,16", "train.accumulation_steps=1,16")
    assert "accumulation_steps=16" in entry(result, "data.batch_size = 8")
    assert result.stderr.startswith("1 mistake ")


def test_mistakes_about_devices_are_listed_with_all_others(run, monkeypatch):
    sizes = ("mesh.fsdp=3", "data.batch_size=7", "runtime.cpu_devices=8")
    result = run(*sizes, "model.num_hedas=3")
    assert result.stderr.startswith("4 mistakes")
    assert "multiply to the 8 devices" in result.stderr
    # Mistakes are in the order typed, and then in the order of the config.
    starts = [
        line.split()[0] for line in result.stderr.splitlines() if line[:3] == "  m"
    ]
    assert starts == ["mesh", "model.num_hedas", "mesh.params.embed"]
    assert "nearest: 6 or 9" in entry(result, "data.batch_size = 7")
    # Other flags leave the number of devices as it is.
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert run(*sizes, "model.num_hedas=3").stderr.startswith("4 mistakes")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert run(*sizes, "model.num_hedas=3").stderr.startswith("3 mistakes")
    monkeypatch.setenv("XLA_FLAGS", "")
    # The number of devices is not known for several processes.
    monkeypatch.setenv("SLURM_NTASKS", "2")
    result = run(*sizes, "mesh.tensor=8", "model.num_hedas=3")
    assert result.stderr.startswith("4 mistakes")
    assert "num_kv_heads=4 on 8" in entry(result, "mesh.params.kv_heads = tensor")


def test_rules_that_are_missing_or_clash_are_named(run):
    removed = ("~mesh.params.experts", "~mesh.activations.seq")
    clashing = ("mesh.activations.embed=data", "mesh.activations.head_dim=tensor")
    result = run(*removed, *clashing)
    for name in ("mesh.params.experts", "mesh.activations.seq"):
        assert "or null (replicated)" in entry(result, name)
    assert "mesh.activations.batch does" in entry(
        result, "mesh.activations.embed = data"
    )
    assert "kv_heads does" in result.stderr
    assert result.stderr.startswith("5 mistakes")
    result = run("mesh.params.embed=5")
    assert "must be a mesh axis" in entry(result, "mesh.params.embed = 5")


def test_a_mistake_says_what_the_key_means(run):
    overrides = (
        "train.num_steps=0",
        "data.skip_batches=[3,1]",
        "train.remat=[mlp_upp]",
    )
    result = run(*overrides)
    assert "or a list of query, key, value, " in entry(
        result, "train.remat = [mlp_upp]"
    )
    assert "(The number of updates in" in entry(result, "train.num_steps = 0")
    assert "must be pairs" in entry(result, "data.skip_batches = [3,1]")


def test_an_unknown_tracker_is_named(run):
    result = run("tracker=[wandb,tensorbord]", "tracker.wandb.mode=on")
    message = entry(result, "tracker = [wandb,tensorbord]")
    assert "did you mean tensorboard?" in message
    assert "must be offline or online" in entry(result, "tracker.wandb.mode = on")
    result = run("tracker=[none,wandb]")
    assert "none stands alone" in entry(result, "tracker = [none,wandb]")


def test_a_key_of_another_trainer_is_translated(run):
    overrides = ("block_size=256", "training.seq_len=64", "--max_iters=5")
    overrides += (
        "--per_device_train_batch_size=4",
        "optimizer.beta1=0.8",
        "eval_steps=7",
    )
    result = run(*overrides, "--num_steps=30", "resume=true")
    for title, text in (
        ("block_size = 256", "it is called data.sequence_length here"),
        ("training.seq_len = 64", "it is called data.sequence_length here"),
        ("--per_device_train_batch_size=4", "it is called data.batch_size here"),
        ("optimizer.beta1 = 0.8", "it is called optimizer.b1 here"),
        ("eval_steps = 7", "eval.interval_steps here, or eval.num_batches here"),
        ("--max_iters=5", "it is called train.num_steps here"),
        ("--num_steps=30", "train.num_steps=30?"),
        ("resume = true", "the same command continues a run"),
    ):
        assert text in entry(result, title)


@pytest.mark.parametrize("dots", ["...", "\N{HORIZONTAL ELLIPSIS}"])
def test_dots_copied_from_a_page_are_explained(run, dots):
    result = run(dots, f"run.dir={dots}", f"optimizer.b1={dots}", f"+train.new={dots}")
    assert result.stderr.startswith("4 mistakes")
    for title in (dots, f"run.dir = {dots}", f"optimizer.b1 = {dots}"):
        assert "stands for what a page leaves out" in entry(result, title)
    quoted = run(f'run.name="a{dots}"', "init_from='\"...\"'", "--cfg", "job")
    assert quoted.returncode == 0, quoted.stderr


@pytest.mark.parametrize(
    "form",
    ["{}", "{}=1", "~{}", "+{}=1", "model={}", "+{}@model=x", "--config-dir={}"],
)
@pytest.mark.parametrize("letters", [300, 5000])
def test_a_name_too_long_for_a_file_is_a_mistake_like_others(run, form, letters):
    result = run(form.format("x" * letters))
    assert result.returncode == 78
    assert "1 mistake" in result.stderr
