"""The help of each command lists its own keys, flags and exit codes."""

import re
from dataclasses import fields

import pytest

from data.program import FOLDER, shown_command
from launch.config import schema_of
from tests.train.cli.commands import COMMANDS
from train.cli.hints import bare_type, keys_of, meaning_of, type_of
from train.config import Config

TRAINING = {field.name for field in fields(Config)}
CASES = {
    **{name.split(".")[1]: (schema, []) for name, schema in COMMANDS.items()},
    **{
        f"launch {kind}": (schema_of(kind), [f"cluster={kind}"])
        for kind in ("local", "slurm")
    },
    "train": (Config, []),
    "branch": (Config, []),
}


SHOWN = dict[str, str]()  # the help of each case, which takes a second to compose


@pytest.fixture
def shown(run):
    """Return a function that returns the help of a case, with single spaces."""

    def shown(name: str, *arguments: str) -> str:
        if not arguments and name in SHOWN:
            return SHOWN[name]
        schema, choices = CASES[name]
        command = (print, name.split()[0], schema, lambda config: [], choices)
        result = run("--help", *arguments, command=command)
        assert (result.returncode, result.stderr) == (0, "")
        SHOWN[name] = " ".join(result.stdout.split())
        return SHOWN[name]

    return shown


@pytest.mark.parametrize("name", CASES)
def test_each_key_is_listed_with_its_sentence(shown, name):
    text = shown(name)
    schema, _ = CASES[name]
    extends = issubclass(schema, Config) and name not in ("train", "branch")
    for key in keys_of(schema):
        if extends and key.split(".")[0] in TRAINING:
            continue
        if meaning := meaning_of(schema, key):
            preceding_text, match, _ = text.partition(f" {meaning} ")
            assert match, key
            assert f" {key}" in preceding_text
    assert (f"{shown_command('train')} --help lists the keys" in text) is extends


def test_entries_of_tables_and_lists_are_listed(shown):
    text = shown("train")
    for key in (
        "data.sources.<name>.weight",
        "data.batch_schedule[i].rows",
        "data.weight_changes[i].step",
    ):
        name = key.replace("[i]", ".i")
        assert not hasattr(bare_type(type_of(Config, name)[0]), "__dataclass_fields__")
        assert f"{key} {meaning_of(Config, name)}" in text


@pytest.mark.parametrize("name", CASES)
def test_flags_and_exit_codes_are_those_of_the_command(shown, name):
    text = shown(name)
    sweeps = name in ("train", "plan", "prove", "coordinates")
    assert ("--multirun key=a,b" in text) is sweeps
    trains = name.split()[0] in ("train", "branch", "launch")
    assert ("42 preempted" in text) is trains
    assert ("3 diverged" in text) is trains
    assert ("4 does not fit" in text) is (trains or name == "plan")
    assert ("5 a mesh" in text) is (trains or name in ("prove", "coordinates"))
    assert "0 finished" in text
    assert "78 wrong config" in text
    has_presets = issubclass(CASES[name][0], Config) and name != "branch"
    assert ("--config-dir" in text) is has_presets


def test_defaults_are_those_of_the_commands_presets(shown):
    text = shown("train")
    assert " optimizer.learning_rate=" in text
    assert " data.sequence_length=128 " in text
    assert " model.num_layers=4 " in text


def test_help_begins_with_the_essentials(shown, run):
    head = run("--help").stdout.partition("\nKeys, ")[0]
    assert len(head.splitlines()) <= 50
    for text in (f"{shown_command('train')} ", "mesh: auto, ddp", "Examples:"):
        assert text in head
    assert "cluster:" not in head
    commands = {path.stem for path in (FOLDER / "configs").glob("*.yaml")}
    for name in commands - {"train"}:
        assert re.search(rf"\b{name}\b", head), name


def test_presets_of_the_user_are_listed(shown, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: 3\n")
    assert "mine" in shown("train", "--config-dir", str(tmp_path))
