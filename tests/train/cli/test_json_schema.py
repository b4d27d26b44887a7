"""`--cfg schema` describes the values that commands take, and refuses all others."""

import functools
import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from launch.config import KINDS, Action, LaunchConfig, schema_of
from tests.train.cli.commands import COMMANDS
from tests.train.cli.conftest import entry
from train.cli.command import compose, config_yaml
from train.cli.hints import bare_type, keys_of, type_of
from train.cli.json_schema import json_schema_text
from train.cli.presets import CONFIG_DIR
from train.cli.rules import must_name_run
from train.cli.schema import convert
from train.config import Config
from train.status import StatusConfig

SCHEMAS = {
    "train": Config,
    **COMMANDS,
    **{f"launch cluster={kind}": schema_of(kind) for kind in KINDS},
}
# Values of several types, and beyond the bounds of many keys.
VALUES = [-2, -1, 0, 0.5, 2**40, 10.0**30, True, None, "?", ["?"], [-1], {"?": {}}, {}]


@functools.cache
def json_schema(name: str) -> dict[str, Any]:
    return json.loads(json_schema_text(SCHEMAS[name]))


@functools.cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json_schema(name))


def plain(config: Any) -> Any:
    """Return the values that `--cfg job` prints."""
    return yaml.safe_load(config_yaml(config))


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_is_a_schema(name: str):
    assert json_schema(name)["$schema"].endswith("/draft/2020-12/schema")
    Draft202012Validator.check_schema(json_schema(name))
    json.dumps(json_schema(name), allow_nan=False)


GROUPS = sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir())


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "cluster"])
def test_every_preset_is_valid(group: str):
    assert choices(group)
    for choice in choices(group):
        validator("train").validate(plain(compose([f"{group}={choice}"])))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cluster_is_valid(kind: str):
    config = compose([f"cluster={kind}"], "launch", schema_of(kind))
    validator(f"launch cluster={kind}").validate(plain(config))
    assert choices("cluster") == sorted(KINDS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_defaults_are_complete_and_valid(name: str):
    """Every key has its default, or is a section whose keys have theirs."""
    defaults = defaults_in(json_schema(name), json_schema(name))
    assert defaults == plain(SCHEMAS[name]())
    validator(name).validate(defaults)


def defaults_in(section: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    return {
        key: values["default"]
        if "default" in values
        else defaults_in(resolved(values, root), root)
        for key, values in section["properties"].items()
    }


def resolved(values: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, or the definition to which it refers."""
    return root["$defs"][Path(values["$ref"]).name] if "$ref" in values else values


def schema_of_key(name: str, key: str) -> dict[str, Any]:
    root = json_schema(name)
    values = root
    for part in key.split("."):
        values = resolved(values["properties"][part], root)
    return values


def nested(key: str, value: object) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_the_command_refuses_the_schema_refuses(name: str):
    schema = SCHEMAS[name]
    refused = 0
    for key in keys_of(schema):
        if is_dataclass(bare_type(type_of(schema, key)[0])):
            continue
        for value in VALUES:
            values = nested(key, value)
            if convert(values, schema)[1]:
                refused += 1
                assert not validator(name).is_valid(values), values
    assert refused > 3 * len(keys_of(schema))


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_number_is_bounded_as_the_command_bounds_it(name: str):
    """A bound itself is accepted if it belongs to the range, and one less is not."""
    schema = SCHEMAS[name]
    bounded = 0
    for key in keys_of(schema):
        values = schema_of_key(name, key)
        for form in values.get("anyOf", [values]):
            if "minimum" not in form:
                continue
            bounded += 1
            for value in (form["minimum"], form["minimum"] - 1):
                is_accepted = not convert(nested(key, value), schema)[1]
                assert validator(name).is_valid(nested(key, value)) is is_accepted
    assert bounded or name not in ("train", "train.plan")


def test_unknown_keys_are_refused_in_every_section():
    keys = ["models", "model.layers", "mesh.dcn.x", "data.sources.code.share"]
    for key in keys:
        assert not validator("train").is_valid(nested(key, 1)), key
    assert validator("train").is_valid(nested("data.sources.code.weight", 1))
    for name in ("match", "pattern"):
        groups = nested("optimizer.groups", [{name: "*norm*"}])
        assert validator("train").is_valid(groups) is (name == "match")


def test_choices_are_enumerated():
    actions = schema_of_key("launch cluster=slurm", "action")["enum"]
    assert actions == [*Action.__members__]
    assert not validator("train").is_valid({"optimizer": {"name": "sgd"}})


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_key_has_its_sentence(name: str):
    root = json_schema(name)
    sentences = dict(descriptions(root, root))
    assert {*keys_of(SCHEMAS[name])} <= sentences.keys()
    assert [key for key, text in sentences.items() if not text.endswith(".")] == []


def descriptions(
    section: dict[str, Any], root: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield each key, also in entries of tables and lists, and its description."""
    for name, values in section["properties"].items():
        target = resolved(values, root)
        yield prefix + name, values.get("description") or target.get("description", "")
        entry = target.get("additionalProperties") or target.get("items") or target
        entry = resolved(entry, root) if isinstance(entry, dict) else {}
        if "properties" in entry:
            yield from descriptions(entry, root, f"{prefix}{name}.")


def test_the_command_prints_it_whatever_the_overrides_are(run):
    for arguments in (["--cfg", "schema"], ["seed=7", "-c", "schema", "mesh=fsdp"]):
        result = run(*arguments)
        assert (result.returncode, result.stderr) == (0, "")
        assert json.loads(result.stdout) == json_schema("train")
    mistake = run("--cfg", "schema", "train.num_steps=0", "train.num_stepz=1")
    assert "at least 1" in entry(mistake, "train.num_steps = 0")
    assert "did you mean" in entry(mistake, "train.num_stepz = 1")
    assert mistake.stdout == ""
    result = run("--cfg", "schema", "--package", "model")
    assert "not possible with --cfg schema" in entry(result, "--package = model")


def test_a_command_on_a_run_needs_no_run(run):
    command = (print, "status", StatusConfig, must_name_run)
    result = run("--cfg", "schema", command=command)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == json_schema("train.status")


def test_launch_describes_the_chosen_kind_of_cluster():
    slurm = schema_of_key("launch cluster=slurm", "cluster")["properties"]
    local = schema_of_key("launch cluster=local", "cluster")["properties"]
    assert "partition" in slurm.keys() - local.keys()
    assert json_schema("launch cluster=slurm")["description"] == LaunchConfig.__doc__
