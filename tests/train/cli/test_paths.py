"""Every command accepts usable texts and paths, and refuses others with a sentence."""

import os
import subprocess
import sys

import pytest

from data.key_value_store import KeyValueStore
from data.prepare_config import PrepareConfig
from data.storage import EXTRAS, local_path, storage_path
from launch.config import schema_of
from tests.fleet import REPOSITORY
from tests.program import module_option
from train.cli.compose import check_command_line
from train.cli.quoting import hydra_text
from train.config import Config
from train.errors import ConfigError
from train.evaluate.__main__ import EvaluateConfig
from train.export import ExportConfig
from train.plan.config import PlanConfig
from train.report import ReportConfig
from train.sample.__main__ import SampleConfig
from train.status import StatusConfig

KEYS = [
    *(("train", Config, key) for key in ("run.dir", "data.path", "init_from")),
    *(("train", Config, key) for key in ("data.cache_dir", "data.tokenizer")),
    ("plan", PlanConfig, "output"),
    ("evaluate", EvaluateConfig, "run.dir"),
    ("evaluate", EvaluateConfig, "task_path"),
    ("sample", SampleConfig, "output"),
    ("export", ExportConfig, "output"),
    ("status", StatusConfig, "run.dir"),
    ("report", ReportConfig, "output"),
    ("prepare", PrepareConfig, "input"),
    ("prepare", PrepareConfig, "output"),
    ("launch", schema_of("local"), "output"),
]
REFUSED = {
    "nothing": ("", "is empty"),
    "nul": ("a\0b", "control characters"),
    "line break": ("a\nb", "control characters"),
    "escape": ("a\x1b[31m", "control characters"),
    "delete": ("a\x7f", "control characters"),
    "not utf-8": ("a\udcff", "not valid UTF-8"),
    "half a pair": ("\ud800", "not valid UTF-8"),
    "long name": ("x" * 300, "at most 255 bytes"),
    "long name of two bytes a letter": ("é" * 200, "at most 255 bytes"),
    "long path": ("x/" * 3000, "at most 3,000 bytes"),
    "password": ("s3://key:Zq9SECRETzQ9@bucket/x", "name of a bucket after s3://"),
    "no bucket": ("gs:///x", "name of a bucket after gs://"),
    "no name of a bucket": ("s3://a b/x", "name of a bucket after s3://"),
    "no such user": ("~nobody-of-this-name/x", "no such user"),
}


def config_of(name, schema, key, text):
    choices = ["cluster=local"] if name == "launch" else []
    return check_command_line(
        [hydra_text(key, text)], name, schema, default_choices=choices
    )


@pytest.mark.parametrize(("text", "rule"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize(("name", "schema", "key"), KEYS, ids=lambda v: str(v)[-24:])
def test_an_impossible_path_is_refused(name, schema, key, text, rule):
    with pytest.raises(ConfigError) as error:
        config_of(name, schema, key, text)
    ((mistaken_key, _, message, _),) = error.value.mistakes
    assert mistaken_key == key
    assert rule in message
    assert "SECRET" not in str(error.value)
    str(error.value).encode()  # it can be printed, on one line
    assert len(str(error.value)) < 400


POSSIBLE = [
    "a/../b",
    "./a",
    "a\\b",
    " a ",
    "日本",
    "x" * 255,
    "a//b/",
    "~/x",
    "-",
    "a:b",
    "s3://arn:aws:s3:us-west-2:12:accesspoint/name/x",
    "gs://a.b-c_d",
]


@pytest.mark.parametrize("scheme", EXTRAS)
def test_the_bucket_of_every_store_is_checked(scheme):
    with pytest.raises(ConfigError, match="name of a bucket"):
        config_of("train", Config, "run.dir", f"{scheme}://")


@pytest.mark.parametrize("text", POSSIBLE)
def test_other_paths_are_used_unchanged(text):
    config = config_of("train", Config, "run.dir", text)
    assert config.run.dir == text


NAMES = {
    **{name: text for name, (text, _) in REFUSED.items() if "path" not in name},
    "this folder": ".",
    "parent": "..",
    "up": "a/../../b",
    "inside": "a/./b",
    "absolute": "/a",
    "empty part": "a//b",
    "ends with a slash": "a/",
    "backslash": "a\\b",
    "leading space": " a",
    "trailing space": "a ",
    "only a space": " ",
    "no-break space": "\u00a0a",
}
del NAMES["nothing"]  # the name is then made from the config
del NAMES["no such user"]  # a run's name is no path from home


@pytest.mark.parametrize("text", NAMES.values(), ids=NAMES)
def test_an_impossible_run_name_is_refused(text):
    with pytest.raises(ConfigError) as error:
        config_of("train", Config, "run.name", text)
    assert [mistake.key for mistake in error.value.mistakes] == ["run.name"]


@pytest.mark.parametrize(
    "text", ["base-1b", "sweep/3", "日本", "a b", "x" * 200, "~", "..a"]
)
def test_other_names_of_runs_are_possible(text):
    assert config_of("train", Config, "run.name", text).run.name == text


def test_texts_that_are_no_paths_may_hold_anything_but_broken_utf8():
    text = "a\nb\x1b\\" + "x" * 5000
    assert config_of("sample", SampleConfig, "prompt", text).prompt == text
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        config_of("sample", SampleConfig, "prompt", "a\udcff")


def test_the_parent_of_a_folder_is_named_without_dots(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far/away")
    monkeypatch.chdir(tmp_path / "a")
    for text, path in {
        "../b": tmp_path / "b",
        f"{tmp_path}/a/../b/./c": tmp_path / "b/c",
        f"{tmp_path}/link/../b": tmp_path / "far/b",  # the system follows the link
        "b": tmp_path / "a/b",
    }.items():
        assert str(storage_path(text)) == str(path)
        assert local_path(text) == path
        store = KeyValueStore(text)
        store.write("x", b"1")
        assert (path / "x").read_bytes() == b"1"


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}])
def test_names_are_the_same_in_every_locale(locale):
    environment = {**os.environ, **locale, "PYTHONUTF8": "0", "PYTHONPATH": REPOSITORY}
    command = [sys.executable, "-P", *module_option("train")]
    command += ["run.name=日本-é", "--cfg", "job"]
    result = subprocess.run(command, capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "  name: 日本-é\n" in result.stdout.decode()
    command[4:5] = [b"run.name=a\xff"]
    result = subprocess.run(command, capture_output=True, env=environment)
    assert result.returncode == 78
    assert b"is not valid UTF-8" in result.stderr
