import hashlib
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import tiktoken

from data import bpe
from data.catalog import FORMATS
from data.encoding import encode
from data.errors import DataError
from data.text import files, streams
from data.text.records import ReadSettings
from data.tokenizer import load_tokenizer
from data.tokenizer_json import check_same_ids, tokenizer_json
from data.train_tokenizer import TrainTokenizerConfig, main, train_tokenizer_mistakes
from tests.fleet import REPOSITORY
from tests.program import module_option

VOCAB_SIZE = 1000


def library(split: Literal["train", "validation"]) -> list[str]:
    """Return modules of Python's standard library; every fifth is validation."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text("utf-8", "replace") for path in paths]
    held_out = texts[::5]
    if split == "train":
        del texts[::5]
    return texts if split == "train" else held_out


def load(path: Path, content: bytes) -> tiktoken.Encoding:
    path.write_bytes(content)
    return load_tokenizer(str(path), hashlib.sha256(content).hexdigest())


@pytest.fixture(scope="module")
def content() -> bytes:
    return bpe.train(library("train"), VOCAB_SIZE)


@pytest.fixture(scope="module")
def encoding(content, tmp_path_factory) -> tiktoken.Encoding:
    return load(tmp_path_factory.mktemp("bpe") / "a.tiktoken", content)


def test_the_rank_file_holds_the_bytes_then_the_merges(encoding):
    assert encoding.eot_token == encoding.n_vocab - 1 == VOCAB_SIZE
    tokens = [encoding.decode_single_token_bytes(rank) for rank in range(VOCAB_SIZE)]
    assert sorted(tokens[:256]) == [bytes([byte]) for byte in range(256)]
    assert tokens[0] == b"!"  # GPT-2's file begins with it too
    assert {b"(self", b":\n"} < set(tokens)  # GPT-2's pattern would divide these
    earlier_tokens = set(tokens[:256])
    for token in tokens[256:]:  # each merges two earlier tokens
        cuts = range(1, len(token))
        assert any(
            token[:cut] in earlier_tokens and token[cut:] in earlier_tokens
            for cut in cuts
        )
        earlier_tokens.add(token)


def test_both_libraries_encode_real_text_to_the_same_few_ids(encoding):
    texts = [*library("validation"), "x = 1234567890\n"]
    check_same_ids(encoding, json.dumps(tokenizer_json(encoding)), texts)
    text = "".join(texts).encode()
    assert len(text) / len(encode(encoding, text)) > 2.3


def test_the_file_depends_on_the_texts_not_on_their_order(content):
    assert bpe.train(library("train")[::-1], VOCAB_SIZE) == content
    assert bpe.train(library("train")[:50], VOCAB_SIZE) != content


def test_too_little_text_names_the_largest_vocab_size(tmp_path):
    with pytest.raises(DataError, match=r"at most vocab_size=258$"):
        bpe.train(["abc abc"], 300)  # " abc" occurs once
    assert load(tmp_path / "few", bpe.train(["abc abc"], 258)).n_vocab == 259


def test_long_texts_are_cut_after_lines_if_they_have_any():
    lines = "a naïve 猫\n" * 5000
    pieces = list(bpe.pieces_of([lines, "x" * 40000, "", "short"]))
    assert "".join(pieces) == lines + "x" * 40000 + "short"
    assert max(map(len, pieces)) <= bpe.PIECE_LENGTH
    assert all(piece.endswith("\n") for piece in pieces if "猫" in piece)
    assert pieces[-4:-1] == ["x" * 16384, "x" * 16384, "x" * 7232]
    assert list(bpe.pieces_of(["a\ud800b"])) == ["a?b"]


def test_held_out_texts_are_not_trained_on():
    sample: list[str] = []
    texts = [f"text {index}" for index in range(60)]
    training_texts = list(bpe.hold_out(texts, sample))
    assert sorted(training_texts + sample) == sorted(texts)
    assert len(sample) == 3
    assert list(bpe.hold_out(["the only one"], sample)) == ["the only one"]


def texts_of(path: Path, max_bytes: int) -> list[str]:
    settings = ReadSettings(keep_invalid_utf8=True)
    return list(bpe.texts_of([str(path)], max_bytes, settings, FORMATS))


def test_a_sample_is_spread_over_the_whole_input(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "UNIT_BYTES", 10)
    monkeypatch.setattr(streams, "CUT_WINDOW", 1)
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        numbers = "".join(f"{name[-5]}{index:09}" for index in range(50))
        (tmp_path / name).write_text(numbers)
    (tmp_path / ".hidden").write_text("h" * 1000)
    assert texts_of(tmp_path, 1000) == texts_of(tmp_path, 10**9)
    assert len("".join(texts_of(tmp_path, 1000))) == 1000
    tens = [f"{name}{index:09}" for name in "ab" for index in range(0, 50, 10)]
    assert texts_of(tmp_path, 100) == tens
    assert texts_of(tmp_path / "a.txt", 55) == [*tens[:5], "a0000"]


def test_several_inputs_are_read(tmp_path):
    for name in ("a.txt", "b.txt", "c/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "a.txt").write_text("a.txt")
    (tmp_path / "b.txt").write_text("b.txt")
    inputs = [f"{tmp_path}/a.txt", f"{tmp_path}/c", f"{tmp_path}/b*"]
    texts = bpe.texts_of(inputs, 1000, ReadSettings(), FORMATS)
    assert sorted(texts) == ["a.txt", "b.txt", "c/d.jsonl"]


def test_a_file_without_text_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(range(100)))
    with pytest.raises(DataError, match="perhaps token ids"):
        list(bpe.texts_of([str(tmp_path)], 1000, ReadSettings(), FORMATS))


def test_records_are_texts_and_bad_ones_are_left_out(tmp_path):
    lines = ['{"text": "one"}', "no JSON", '{"other": 1}', '{"text": "two"}']
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    assert texts_of(tmp_path, 100) == ["one", "two"]
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    assert texts_of(tmp_path / "latin.txt", 100) == ["na\ufffdve"]


def test_the_output_is_not_part_of_the_input(tmp_path):
    def mistaken_keys(input: str, output: str) -> list[str]:
        config = TrainTokenizerConfig(str(tmp_path / input), str(tmp_path / output))
        return [mistake.key for mistake in train_tokenizer_mistakes(config)]

    assert (
        mistaken_keys("texts", "more/../texts/a")
        == mistaken_keys("texts", "texts")
        == ["output"]
    )
    assert (
        mistaken_keys("texts", "texts.tiktoken")
        == mistaken_keys("texts/a", "texts/b")
        == []
    )


def test_the_command_trains_a_tokenizer(tmp_path):
    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *module_option("data.train_tokenizer"), *overrides]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    (tmp_path / "texts").mkdir()
    for index, text in enumerate(library("validation")):
        (tmp_path / "texts" / f"{index:03}.py").write_text(text)
    (tmp_path / "texts" / "latin").write_bytes(b"na\xefve")
    result = run("input=texts", "output=my bpe", "vocab_size=500")
    assert result.returncode == 0, result.stderr
    name, sha256 = (x.partition("=")[2] for x in shlex.split(result.stdout))
    assert result.stdout.startswith("'data.tokenizer=/")
    assert " data.tokenizer_sha256=" in result.stdout
    assert load_tokenizer(name, sha256).n_vocab == 501
    figure = result.stderr.partition(" bytes per token on ")[0].split()[-1]
    assert 1.7 < float(figure) < 3
    assert run("vocab_size=256").returncode == 78


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "text").write_text("abc abc\n" * 99)
    ranks = tmp_path / "ranks"
    config = TrainTokenizerConfig(str(tmp_path / "text"), str(ranks), vocab_size=258)
    assert main(config) == 0
    status = ranks.stat()
    with pytest.raises(DataError, match="ranks: is there already"):
        main(replace(config, vocab_size=257))
    assert ranks.stat() == status
    with pytest.raises(DataError, match="no folder that can be written to"):
        main(replace(config, output=str(tmp_path / "no/folder")))


def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path, monkeypatch):
    def raise_disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "text").write_text("abc abc\n" * 99)
    config = TrainTokenizerConfig(
        f"{tmp_path}/text", f"{tmp_path}/ranks", vocab_size=258
    )
    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(DataError, match="No space left"):
        main(config)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
