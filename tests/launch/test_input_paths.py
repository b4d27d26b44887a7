"""Inputs that only this machine can read are refused before a job is submitted."""

from collections.abc import Sequence

import pytest

from launch.__main__ import launch_mistakes
from launch.config import schema_of
from train.cli.command import compose

CLUSTERS = {
    "gke_tpu": ("cluster.target=v5e-8", "cluster.image=host/name:1"),
    "gke_gpu": ("cluster.gpu=h100", "cluster.image=host/name:1"),
    "tpu_vm": ("cluster.target=v5e-8", "cluster.zone=us-east5-b"),
}
LOCAL = {
    "data.path": ("data=text", "data.path=texts/mine.txt"),
    "data.path ": ("data=tokens", "data.path=/home/me/store"),
    "data.sources.web.path": (
        "data=mixture",
        "data.sources={web: {path: ./web}, code: {path: gs://bucket/code}}",
    ),
    "eval.sets.wiki.path": ("eval.sets={wiki: {path: stores/wiki}}",),
    "eval.task_path": ("eval.task_path=/home/me/tasks",),
    "data.tokenizer": ("data.tokenizer=/home/me/tokenizer",),
    "init_from": ("init_from=../llama",),
}
REMOTE = (
    ("data=text", "data.path=gs://bucket/text"),
    ("data=tokens", "data.path=s3://bucket/store", "init_from=gs://bucket/run"),
    ("data=text", "data.path=https://host/text.txt"),
    (),
)


def keys_of(kind: str, overrides: Sequence[str]) -> set[str]:
    """Return the keys whose mistake is a path of this machine."""
    words = (f"cluster={kind}", *CLUSTERS[kind], "run.dir=gs://bucket/run", *overrides)
    config = compose(words, "launch", schema_of(kind))
    rule = "is a path of this machine"
    return {m.key for m in launch_mistakes(config) if m.rule.startswith(rule)}


@pytest.mark.parametrize("kind", CLUSTERS)
@pytest.mark.parametrize("key", LOCAL)
def test_a_path_of_this_machine_is_refused(kind, key):
    assert keys_of(kind, LOCAL[key]) == {key.strip()}


@pytest.mark.parametrize("kind", CLUSTERS)
@pytest.mark.parametrize("typed", REMOTE)
def test_paths_that_the_hosts_can_read_are_accepted(kind, typed):
    assert keys_of(kind, typed) == set()


def test_pods_may_mount_a_volume_and_virtual_machines_may_share_files():
    path = ("data=text", "data.path=/mnt/data/text")
    mount = "{containers: [{volumeMounts: [{mountPath: /mnt/data}]}]}"
    merge = f"+cluster.merge={{spec: {mount}}}"
    assert keys_of("gke_gpu", [*path, merge.lstrip("+")]) == set()
    unmounted = ("data=text", "data.path=/mnt/database/text")
    assert keys_of("gke_gpu", [*unmounted, merge.lstrip("+")]) == {"data.path"}
    assert keys_of("tpu_vm", [*path, "cluster.code=shared"]) == set()
