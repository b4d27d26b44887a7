"""Text is encoded on first use; files that are not text are refused or left out."""

import dataclasses
import random
from pathlib import Path

import pytest

from data.catalog import text_store
from data.config import DataConfig, OnError
from data.errors import DataError

PNG = b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(3000)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("00.png", PNG, r"00\.png: is an image, which is not read"),
        ("random", PNG[8:], r"random: is binary data"),
        ("latin.txt", "naïve".encode("latin-1"), r"line 1 \(byte 2\): not UTF-8"),
    ],
)
def test_a_file_that_is_not_text_is_an_error_that_names_it(
    config: DataConfig, folder: Path, name: str, content: bytes, reason: str
):
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        text_store(config)


def test_files_that_are_not_text_can_be_left_out(
    config: DataConfig, folder: Path, caplog: pytest.LogCaptureFixture
):
    """Skipped files change nothing in the store, and each start names them."""
    expected_store = text_store(config)
    (folder / "long.bin").write_bytes(b"text at first " * 2**19 + PNG)
    (folder / "00.png").write_bytes(PNG)
    skip_config = dataclasses.replace(config, on_error=OnError.skip)
    for _ in range(2):
        caplog.clear()
        store = text_store(skip_config)
        assert (
            f"left out 2 files that cannot be read, {7 * 2**20 + 6016} " in caplog.text
        )
        assert f"{folder}/long.bin" in caplog.text
    assert store.fingerprint == expected_store.fingerprint


def test_a_folder_without_any_text_is_refused_even_if_files_are_left_out(
    config: DataConfig, tmp_path: Path
):
    (tmp_path / "a.png").write_bytes(PNG)
    image_config = dataclasses.replace(
        config, path=f"{tmp_path}/a.png", on_error=OnError.skip
    )
    with pytest.raises(DataError, match="on_error=skip leaves no file"):
        text_store(image_config)


def test_a_bad_record_can_be_left_out(
    config: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lines = [f'{{"text": "document {index}"}}\n' for index in range(40)]
    (tmp_path / "a.jsonl").write_text("".join([*lines, "no JSON\n"]))
    record_config = dataclasses.replace(config, path=f"{tmp_path}/a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl, line 41"):
        text_store(record_config)
    store = text_store(dataclasses.replace(record_config, on_error=OnError.skip))
    assert store.manifest["skipped_records"] == 1
    assert "left out 1 bad records" in caplog.text
