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
from tests.program import module_option

NAMES = byte_names()


def write_folder(path: Path, content: bytes) -> str:
    (path / FILE).write_bytes(content)
    return str(path)


def bytes_content() -> dict[str, Any]:
    """Return a tokenizer.json of the single bytes, which can be loaded."""
    return tokenizer_json(load_tokenizer("bytes"))


def with_pattern(pattern: str) -> dict[str, Any]:
    content = bytes_content()
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    split["pattern"] = {"Regex": pattern}
    content["pre_tokenizer"]["pretokenizers"].insert(0, split)
    return content


def refusal(name: str, sha256: str | None = None) -> str:
    with pytest.raises(DataError) as error:
        load_tokenizer(name, sha256)
    message = str(error.value)
    message.encode()
    assert "\n" not in message
    assert len(message) < 800
    return message


def with_vocabulary(**tokens: object) -> dict[str, Any]:
    content = bytes_content()
    content["model"]["vocab"] |= tokens
    return content


def with_added_tokens(*tokens: object) -> dict[str, Any]:
    content = bytes_content()
    return content | {"added_tokens": [*content["added_tokens"], *tokens]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (with_vocabulary(aa=2**31), "2147483648, not one of 0"),
        (with_vocabulary(aa=-1), "is -1, not one of 0"),
        (with_vocabulary(aa=300.5), "is 300.5, not one of 0"),
        (with_vocabulary(aa="x\ud800"), "not one of 0"),
        (with_vocabulary(aa=7), r"the id 7 is of b'\x07' and"),
        (with_vocabulary(**{"": 300}), "has 0 bytes"),
        (with_vocabulary(**{"a" * 2000: 300}), "has 2000 bytes"),
        (with_vocabulary(**{"\ud800": 300}), "not named by bytes"),
        (
            with_added_tokens({"content": NAMES[7], "id": 300}),
            r"byte b'\x07' has no token",
        ),
        (with_added_tokens({"content": "\ud800", "id": 300}), "half a surrogate pair"),
        (with_added_tokens({"content": "", "id": 300}), "has 0 bytes"),
        (with_added_tokens({"content": "<a>", "id": 2**32}), "not one of 0"),
        (with_added_tokens({"content": "<a>"}), "'id' is missing"),
        (with_added_tokens({"content": ["<a>"], "id": 300}), "unhashable"),
        (with_added_tokens("<a>"), ""),
        (bytes_content() | {"added_tokens": {"a": 1}}, ""),
        (bytes_content() | {"normalizer": ["x"] * 10_000}, ""),
        (bytes_content() | {"pre_tokenizer": {"type": "Sequence"}}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tokenizer_is_refused(
    tmp_path: Path, capfd, content: dict[str, Any], reason: str
):
    assert reason in refusal(write_folder(tmp_path, json.dumps(content).encode()))
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
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, capfd, content: bytes):
    name = write_folder(tmp_path, content)
    refusal(name)
    (tmp_path / FILE).write_text(json.dumps(bytes_content() | {"added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    refusal(name)
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
    content = json.dumps(with_pattern(pattern)).encode()
    assert reason in refusal(write_folder(tmp_path, content))
    assert capfd.readouterr().err == ""


def test_a_pattern_that_matches_the_empty_text_is_refused(tmp_path: Path):
    content = json.dumps(with_pattern(r"\p{L}*")).encode()
    assert "fails on a sample" in refusal(write_folder(tmp_path, content))


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
    assert reason in refusal(name, sha256)
    assert capfd.readouterr().err == ""


def test_a_command_reports_a_wrong_tokenizer_and_exits_with_65(tmp_path: Path):
    content = bytes_content()
    content["model"]["vocab"]["aa"] = 7
    (tmp_path / "own").mkdir()
    write_folder(tmp_path / "own", json.dumps(content).encode())
    (tmp_path / "text").write_text("some text")
    command = [sys.executable, *module_option("data.prepare"), f"input={tmp_path}/text"]
    command += [f"output={tmp_path}/store", f"tokenizer={tmp_path}/own"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 65
    assert len(result.stderr.strip().splitlines()) == 1
    assert "the id 7 is of" in result.stderr
