"""A folder's tokenizer.json gives the same ids as `tokenizers`, or is refused."""

import gettext
import importlib.util
import inspect
import json
import pickle
import tokenize
import unicodedata
from pathlib import Path

import pytest
import tiktoken

from data import encoding as encoding_module
from data.encoding import decode, encode, fingerprint
from data.errors import DataError
from data.tokenizer import (
    RANK_FILE_PATTERN,
    load_tokenizer,
    tokenizer_from_bytes,
    tokenizer_to_bytes,
)
from data.tokenizer_folder import FILE
from data.tokenizer_json import SAMPLE, check_same_ids, tokenizer_json

tokenizers = pytest.importorskip("tokenizers")
CODE = inspect.getsource(tokenize)
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def messages() -> list[str]:
    """Return texts in a dozen scripts, from the message catalogues of a package."""
    spec = importlib.util.find_spec("humanize")
    if spec is None or spec.origin is None:
        return []
    texts = []
    for file in sorted(Path(spec.origin).parent.glob("locale/*/*/*.mo")):
        with file.open("rb") as stream:
            catalogue = gettext.GNUTranslations(stream)
        texts.append("\n".join(map(str, catalogue._catalog.values())))  # pyright: ignore
    return texts


TEXTS = [SAMPLE, CODE, *messages()]


def train(pattern: str | None) -> dict:
    """Train 600 tokens; return a tokenizer.json as transformers would write it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.Sequence([split, level])
    tokenizer.pre_tokenizer = level
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return json.loads(tokenizer.to_str())


def write(folder: Path, content: dict, end: object = "</s>") -> str:
    (folder / FILE).write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return str(folder)


@pytest.mark.parametrize("pattern", [None, LLAMA], ids=["gpt2", "llama3"])
def test_ids_are_the_same_as_those_of_tokenizers(tmp_path, pattern):
    content = train(pattern)
    name = write(tmp_path, content, {"content": "</s>"})
    encoding = load_tokenizer(name)
    assert len(TEXTS) > 10, "catalogues of humanize, which Orbax needs"
    check_same_ids(encoding, json.dumps(content), TEXTS)
    assert encoding.eot_token == 1
    assert encode(encoding, b"</s>").tolist() != [1], "text is never control"
    stored = tokenizer_to_bytes(name)
    assert stored is not None
    assert fingerprint(tokenizer_from_bytes("stored", stored)) == fingerprint(encoding)


@pytest.mark.parametrize("pattern", [r"\p{L}+|\p{N}+", r" ?\p{Lu}\p{Ll}+", "猫", "n't"])
def test_text_between_two_matches_is_encoded_as_tokenizers_does(tmp_path, pattern):
    content = train(pattern)
    encoding = load_tokenizer(name := write(tmp_path, content))
    texts = ["a1 b!?  Cat dog", "!" * 5000, *TEXTS]
    check_same_ids(encoding, json.dumps(content), texts)
    for text in texts:
        assert decode(encoding, encode(encoding, text.encode())) == text
    stored = tokenizer_from_bytes("stored", tokenizer_to_bytes(name) or b"")
    check_same_ids(stored, json.dumps(content), texts)


def test_cuts_of_long_text_hide_no_wrong_ids(tmp_path, monkeypatch):
    """Right ids are accepted, and wrong ids are found, wherever `encode` cuts."""
    content = train(LLAMA)
    encoding = load_tokenizer(write(tmp_path, content))
    texts = ["return" * 500, "a \n\n  b" * 300, *TEXTS]
    uncut_ids = [encode(encoding, text.encode()).tolist() for text in texts]
    monkeypatch.setattr(encoding_module, "_PIECE_CHARS", 1000)
    assert [encode(encoding, text.encode()).tolist() for text in texts] != uncut_ids
    check_same_ids(encoding, json.dumps(content), texts)
    for cut in (1, 1000, 2500):
        text = "a" * cut + "1234567"
        with pytest.raises(DataError, match="other ids near"):
            check_same_ids(encoding, json.dumps(train(None)), [text])


EXACT = {"lstrip": False, "rstrip": False, "single_word": False, "special": False}
DECOMPOSED = "Cafe\u0301 <tool>\u0338 A\u030a \u1100\u1161\u11a8 \u212b ﬁ か\u3099"


@pytest.mark.parametrize("form", [None, "NFC", "NFKD"])
def test_added_tokens_are_found_before_text_is_normalized(tmp_path, form):
    content = train(LLAMA)
    content["normalizer"] = form and {"type": form}
    for token, word in enumerate(("<tool", "<tool>"), start=600):
        entry = EXACT | {"id": token, "content": word, "normalized": False}
        content["added_tokens"].append(entry)
    encoding = load_tokenizer(name := write(tmp_path, content))
    texts = [
        *TEXTS,
        DECOMPOSED,
        "a <tool><tools <too",
        unicodedata.normalize("NFD", SAMPLE),
    ]
    check_same_ids(encoding, json.dumps(content), texts)
    assert {600, 601} < {*encode(encoding, b"<tool <tool>").tolist()}
    stored = tokenizer_from_bytes("stored", tokenizer_to_bytes(name) or b"")
    for copy in (stored, pickle.loads(pickle.dumps(encoding))):
        assert fingerprint(copy) == fingerprint(encoding)
        check_same_ids(copy, json.dumps(content), texts)
    plain = content | {"normalizer": None if form else {"type": "NFC"}}
    other_encoding = load_tokenizer(write(tmp_path, plain))
    assert fingerprint(other_encoding) != fingerprint(encoding)
    ids = encode(encoding, DECOMPOSED.encode())
    expected = unicodedata.normalize(form, DECOMPOSED) if form else DECOMPOSED
    if form != "NFC":  # NFC joins the end of <tool> to the next mark
        assert decode(encoding, ids) == expected


@pytest.mark.parametrize("ids", [(300, 301, 302), (256, 300, 258), (301, 300, 400)])
def test_special_tokens_keep_their_ids(tmp_path, ids):
    """The ids follow the vocabulary, lie inside it, or leave gaps."""
    built_in = load_tokenizer("bytes")
    ranks = built_in._mergeable_ranks | {b"a" * (2 + i): 256 + i for i in range(44)}
    ranks = {token: rank for token, rank in ranks.items() if rank not in ids}
    names = ("<|z|>", "<|endoftext|>", "<|a|>")
    special = dict(zip(names, ids, strict=True))
    encoding = tiktoken.Encoding(
        "own",
        pat_str=RANK_FILE_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=special,
    )
    content = tokenizer_json(encoding)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert [tokenizer.token_to_id(name) for name in names] == [*ids]
    check_same_ids(encoding, json.dumps(content), ["aaaaa", *TEXTS[:2]])
    content["added_tokens"].reverse()
    content["model"]["vocab"] = {
        k: v for k, v in content["model"]["vocab"].items() if k not in names
    }
    with pytest.raises(DataError, match="would be"):
        check_same_ids(encoding, json.dumps(content), [])


PARTLY = {"content": "</s>", "id": 1, "lstrip": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "changes text before it is cut"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "cut in another way"),
        ({"pre_tokenizer": None}, "cut in another way"),
        ({"model": {"type": "Unigram"}}, "no byte-level BPE"),
        ({"added_tokens": [PARTLY]}, "only in some places"),
        ({"added_tokens": []}, "no eos_token beside it"),
    ],
)
def test_any_other_tokenizer_is_refused_with_the_reason(tmp_path, change, reason):
    name = write(tmp_path, train(None) | change)
    with pytest.raises(DataError, match=reason):
        load_tokenizer(name)


def test_merges_in_another_order_are_refused(tmp_path):
    content = train(None)
    merges = content["model"]["merges"]
    merges[3], merges[50] = merges[50], merges[3]
    with pytest.raises(DataError, match="order of its ids"):
        load_tokenizer(write(tmp_path, content))
    content = train(RANK_FILE_PATTERN)  # its counts are possessive
    with pytest.raises(DataError, match="repeats a count"):
        load_tokenizer(write(tmp_path, content))


def test_a_folder_of_another_hash_or_without_the_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        load_tokenizer(str(tmp_path))
    name = write(tmp_path, train(None))
    with pytest.raises(DataError, match="SHA-256"):
        load_tokenizer(name, "0" * 64)


def test_text_that_the_pattern_loses_is_refused(tmp_path):
    """A pattern may match nothing in a place that no sample has."""
    encoding = load_tokenizer(write(tmp_path, train(r"(?=♞)|[\s\S]")))
    with pytest.raises(DataError, match=r"(loses a part|tiktoken fails).*Take another"):
        encode(encoding, "a knight: ♞".encode())
