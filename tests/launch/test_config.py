"""Invalid keys of a cluster are named, for every kind."""

import re
from dataclasses import asdict

import pytest

from launch.__main__ import launch_mistakes
from launch.config import KINDS, schema_of
from train.cli.command import compose
from train.cli.schema import convert


@pytest.mark.parametrize(
    ("kind", "key", "value", "rule"),
    [
        ("local", "backoff_s", -1.0, "must be at least 0"),
        ("slurm", "signal_s", 0, r"must be in \[1, 65535\]"),
        ("tpu_vm", "secrets", ["A"], "must be a table {key: value}"),
    ],
)
def test_a_key_out_of_its_bounds_is_named(kind, key, value, rule):
    defaults = asdict(KINDS[kind]())
    assert convert(defaults, KINDS[kind])[1] == []
    config, (mistake,) = convert({**defaults, key: value}, KINDS[kind])
    assert (mistake.key, mistake.value) == (key, value)
    assert re.search(rule, mistake.rule.replace("\n", " "))
    assert config == KINDS[kind]()  # the default replaces it


def test_an_unknown_store_hides_no_other_mistake():
    keys = ["cluster=gke_tpu", "run.dir=ftp://b/r", "cluster.target=v5e-7"]
    config = compose(keys, "launch", schema_of("gke_tpu"))
    keys_with_mistakes = {mistake.key for mistake in launch_mistakes(config)}
    assert keys_with_mistakes == {"run.dir", "cluster.target", "cluster.image"}
