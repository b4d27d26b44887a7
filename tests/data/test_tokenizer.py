import hashlib

import numpy as np
import pytest
import tiktoken

from data.encoding import decode, decode_bytes, encode, fingerprint, padded_vocab_size
from data.errors import DataError
from data.tokenizer import load_tokenizer

TEXT = "naïve 猫 <|endoftext|>\r\n  x".encode()
EVERYTHING = bytes(range(256)) * 2 + TEXT + b"\xed\xa0"


@pytest.fixture(params=["bytes", "ranks"])
def encoding(request, tmp_path, write_ranks) -> tiktoken.Encoding:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    return load_tokenizer(*write_ranks(tmp_path / "ranks").values())


def test_any_bytes_round_trip(encoding):
    assert decode_bytes(encoding, encode(encoding, EVERYTHING)) == EVERYTHING
    assert decode_bytes(encoding, encode(encoding, b"")) == b""
    assert decode(encoding, encode(encoding, "猫 the".encode())) == "猫 the"


def test_a_rank_file_merges_around_bytes_that_are_not_utf8(tmp_path, write_ranks):
    path = tmp_path / "bytes"  # this name must not select the built-in one
    encoding = load_tokenizer(*write_ranks(path).values())
    assert encode(encoding, b"the\xff the").tolist() == [257, 0xFF, 258]


def test_the_name_of_a_special_token_is_text(encoding):
    ids = encode(encoding, b"a<|endoftext|>b")
    assert encoding.eot_token not in ids
    assert decode(encoding, ids) == "a<|endoftext|>b"


def test_any_ids_decode(encoding):
    ids = np.arange(-5, 1000)
    text = decode_bytes(encoding, ids)
    assert text.startswith(bytes(range(256)))
    assert text.endswith(b"<|endoftext|>")
    assert decode(encoding, np.array([0xC3, 400])) == "�"


def test_ids_in_a_gap_of_the_vocabulary_decode_to_nothing():
    gap = tiktoken.Encoding(
        "gap", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={"<|x|>": 5}
    )
    assert decode(gap, [0, 3, 5, 0]) == "a<|x|>a"


def test_bytes_needs_no_list_of_ids():
    encoding = load_tokenizer("bytes")
    assert encoding.n_vocab == 257
    assert encoding.eot_token == 256
    assert padded_vocab_size(encoding) == 384
    assert encode(encoding, b"ab").dtype == np.uint8
    assert encoding.encode_ordinary("aé") == encode(encoding, "aé".encode()).tolist()


def test_the_fingerprint_depends_on_the_ids_not_on_the_name(tmp_path, write_ranks):
    files = [
        write_ranks(tmp_path / "a"),
        write_ranks(tmp_path / "b"),
        write_ranks(tmp_path / "c", (b"he", b"the")),
    ]
    fingerprints = [fingerprint(load_tokenizer(*file.values())) for file in files]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    bytes_print = "427ac374a327c594eb2b324aaee4eeab922dda2d73e5d31c853f24460814ad1b"
    assert fingerprint(load_tokenizer("bytes")) == bytes_print, (
        "every existing store of bytes would be refused: raise the store's SCHEMA too"
    )


def test_a_rank_file_needs_its_hash(tmp_path, write_ranks):
    path, sha256 = write_ranks(tmp_path / "r.tiktoken").values()
    for digest in (None, "0" * 64):
        with pytest.raises(DataError, match=f"(?s){sha256}.*config gives {digest}"):
            load_tokenizer(path, digest)


def test_a_missing_or_malformed_rank_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gtp2.*not one of bytes, gpt2"):
        load_tokenizer("gtp2")
    path = tmp_path / "novel.txt"
    path.write_bytes(b"It was a dark and stormy night")
    with pytest.raises(DataError, match=r"novel\.txt.*not a tiktoken rank file"):
        load_tokenizer(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def test_without_network_a_published_vocabulary_says_so(tmp_path, monkeypatch):
    for variable in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(DataError, match=r"can it be downloaded.*tokenizer bytes"):
        load_tokenizer("gpt2")
