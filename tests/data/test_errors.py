"""A missing optional package is a mistake of the setup, and no data is damaged."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from data import bpe
from data.catalog import FORMATS, text_store
from data.config import DataConfig, Source
from data.errors import MissingPackageError
from data.prepare_config import PrepareConfig
from data.sources import open_sets, open_sources
from data.text.records import ReadSettings
from data.token_store.build import prepare_store
from tests.fleet import REPOSITORY
from tests.program import program_code
from train.errors import WRONG_CONFIG, exit_code

FILES = {
    "a.parquet": "pyarrow",
    "a.arrow": "pyarrow",
    "a.txt.zst": "zstandard",
    "a.jsonl.zst": "zstandard",
    "a.csv.zst": "zstandard",
    "unnamed": "zstandard",
}


@pytest.mark.parametrize("name", FILES)
def test_each_way_to_read_a_file_names_the_package(
    name: str, tmp_path: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd\0\0")
    store = open_sources(config, text_store)
    monkeypatch.setitem(sys.modules, FILES[name], None)
    path = str(tmp_path / name)
    prepare = PrepareConfig(path, f"{tmp_path}/store", workers=1)
    text = dataclasses.replace(config, source=Source.text, path=path)
    readers = [
        lambda: prepare_store(prepare, FORMATS),
        lambda: open_sources(text, text_store),
        lambda: open_sets(store, config, {"other": path}, text_store),
        lambda: list(bpe.texts_of([path], 1000, ReadSettings(), FORMATS)),
    ]
    for read in readers:
        with pytest.raises(MissingPackageError) as error:
            read()
        assert FILES[name] in str(error.value)
        assert 'pip install -e ".[data]"' in str(error.value)
        assert exit_code(error.value) == WRONG_CONFIG


BLOCKED = """
import runpy, sys
from data.program import PREFIX

for name in ("s3fs", "gcsfs", "huggingface_hub", "aiohttp", "tokenizers"):
    sys.modules[name] = None
for command, *arguments in {commands}:
    sys.argv[1:] = arguments
    runpy.run_module(PREFIX + command, run_name="__main__")
"""
URLS = ["s3://bucket/a", "gs://bucket/a", "hf://datasets/a/b", "https://example.org/a"]


@pytest.mark.parametrize("url", URLS)
def test_a_command_exits_with_78_if_the_client_of_a_store_is_missing(
    url: str, tmp_path: Path
):
    command = ("data.prepare", f"input={url}", f"output={tmp_path}/store")
    result = run_blocked(command)
    assert (result.returncode, "pip install" in result.stderr) == (78, True)


def test_a_command_exits_with_78_if_tokenizers_is_missing(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abc " * 99)
    result = run_blocked(
        ("data.train_tokenizer", f"input={tmp_path}/a.txt", f"output={tmp_path}/ranks")
    )
    assert (result.returncode, "pip install" in result.stderr) == (78, True)
    assert not (tmp_path / "ranks").exists()


def run_blocked(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    code = program_code(BLOCKED.format(commands=[command]))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
