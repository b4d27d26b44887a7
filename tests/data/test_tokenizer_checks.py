"""A broken or hostile tokenizer is refused in a sentence, and harms no process."""

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.tokenizer import load_tokenizer
from data.tokenizer_folder import FILE
from data.tokenizer_json import byte_names, tokenizer_json
from tests.fleet import REPOSITORY

NAMES = byte_names()


def folder_of(path: Path, content: bytes) -> str:
    (path / FILE).write_bytes(content)
    return str(path)


def of_bytes() -> dict[str, Any]:
    """Return a tokenizer.json of the single bytes, which can be loaded."""
    return tokenizer_json(load_tokenizer("bytes"))


def cut_by(pattern: str) -> dict[str, Any]:
    content = of_bytes()
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    split["pattern"] = {"Regex": pattern}
    content["pre_tokenizer"]["pretokenizers"].insert(0, split)
    return content


def refused(name: str, sha256: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        load_tokenizer(name, sha256)
    message = str(caught.value)
    message.encode()
    assert "\n" not in message
    assert len(message) < 800
    return message


def vocabulary(**tokens: object) -> dict[str, Any]:
    content = of_bytes()
    content["model"]["vocab"] |= tokens
    return content


def added(*tokens: object) -> dict[str, Any]:
    content = of_bytes()
    return content | {"added_tokens": [*content["added_tokens"], *tokens]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (vocabulary(aa=2**31), "2147483648, not one of 0"),
        (vocabulary(aa=-1), "is -1, not one of 0"),
        (vocabulary(aa=300.5), "is 300.5, not one of 0"),
        (vocabulary(aa="x\ud800"), "not one of 0"),
        (vocabulary(aa=7), r"the id 7 is of b'\x07' and"),
        (vocabulary(**{"": 300}), "has 0 bytes"),
        (vocabulary(**{"a" * 2000: 300}), "has 2000 bytes"),
        (vocabulary(**{"\ud800": 300}), "not named by bytes"),
        (added({"content": NAMES[7], "id": 300}), r"byte b'\x07' has no token"),
        (added({"content": "\ud800", "id": 300}), "half a surrogate pair"),
        (added({"content": "", "id": 300}), "has 0 bytes"),
        (added({"content": "<a>", "id": 2**32}), "not one of 0"),
        (added({"content": "<a>"}), "'id' is missing"),
        (added({"content": ["<a>"], "id": 300}), "unhashable"),
        (added("<a>"), ""),
        (of_bytes() | {"added_tokens": {"a": 1}}, ""),
        (of_bytes() | {"normalizer": ["x"] * 10_000}, ""),
        (of_bytes() | {"pre_tokenizer": {"type": "Sequence"}}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tokenizer_is_refused(
    tmp_path: Path, capfd, content: dict[str, Any], reason: str
):
    assert reason in refused(folder_of(tmp_path, json.dumps(content).encode()))
    assert capfd.readouterr().err == "", "tiktoken's Rust speaks when it panics"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\0",
        b"[]",
        b"[" * 100_000,
        b'{"model": null}',
        b'{"model": {"type": "BPE", "vocab": [], "merges": 3}}',
    ],
    ids=lambda content: content[:20].decode("latin-1"),
)
def test_a_file_of_anything_else_is_refused(tmp_path: Path, capfd, content: bytes):
    name = folder_of(tmp_path, content)
    refused(name)
    (tmp_path / FILE).write_text(json.dumps(of_bytes() | {"added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    refused(name)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?:a+)+(?=b)", "Max limit for backtracking"),
        (r"(?:\w+\s?)+(?<!x)$|[\s\S]", "Max limit for backtracking"),
        (r"(.)\1", "refers to its own groups"),
        ("(" * 50_000 + ")" * 50_000, "nested"),
        (r"(?=((a{200}){200}){200})", "fails on a sample"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_pattern_that_fails_or_loses_text_is_refused(
    tmp_path: Path, capfd, pattern: str, reason: str
):
    content = json.dumps(cut_by(pattern)).encode()
    assert reason in refused(folder_of(tmp_path, content))
    assert capfd.readouterr().err == ""


def test_a_pattern_that_matches_the_empty_text_is_refused(tmp_path: Path):
    content = json.dumps(cut_by(r"\p{L}*")).encode()
    assert "fails on a sample" in refused(folder_of(tmp_path, content))


LINES = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([*LINES, b"YWE= 2147483648"], "not one of 0"),
        ([*LINES, b"YQ== 300"], "b'a' occurs twice"),
        ([*LINES, b"=== 300"], "base64"),
        ([*LINES, b"YWE= 1" + b"0" * 5000], "digits"),
        ([*LINES, b"YWE="], "unpack"),
        ([], "has no token"),
        ([b'{"ranks": [["YQ==", 1]]}'], "special_tokens"),
    ],
)
def test_a_wrong_rank_file_is_refused(
    tmp_path: Path, capfd, lines: list[bytes], reason: str
):
    content = b"\n".join(lines)
    (tmp_path / "ranks").write_bytes(content)
    name = str(tmp_path / "ranks")
    sha256 = hashlib.sha256(content).hexdigest()
    assert reason in refused(name, sha256)
    assert capfd.readouterr().err == ""


def test_a_command_says_it_in_a_sentence_and_exits_with_65(tmp_path: Path):
    content = of_bytes()
    content["model"]["vocab"]["aa"] = 7
    (tmp_path / "own").mkdir()
    folder_of(tmp_path / "own", json.dumps(content).encode())
    (tmp_path / "text").write_text("some text")
    command = [sys.executable, "-m", "data.prepare", f"input={tmp_path}/text"]
    command += [f"output={tmp_path}/store", f"tokenizer={tmp_path}/own"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 65
    assert len(done.stderr.strip().splitlines()) == 1
    assert "the id 7 is of" in done.stderr
