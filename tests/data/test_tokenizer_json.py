"""A tokenizer that was imported is exported unchanged."""

import json
import pickle
import random

import pytest

from data.encoding import decode, encode, fingerprint
from data.errors import DataError
from data.tokenizer import load_tokenizer, tokenizer_from_bytes, tokenizer_to_bytes
from data.tokenizer_json import SAMPLE, check_same_ids, tokenizer_files
from tests.data.tokenizer_shapes import SHAPES, TEXT, write_shape

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(params=SHAPES)
def shape(request, tmp_path):
    """Return the folder of a tokenizer, and the content of its files."""
    return str(tmp_path), write_shape(tmp_path, request.param)


def test_files_are_exported_as_they_were(shape):
    """A copy from a token store or from another process exports the same files."""
    folder, files = shape
    encoding = load_tokenizer(folder)
    stored = tokenizer_from_bytes("stored", tokenizer_to_bytes(folder) or b"")
    files = {name: text for name, text in files.items() if "generation" not in name}
    for copy in (encoding, stored, pickle.loads(pickle.dumps(encoding))):
        assert fingerprint(copy) == fingerprint(encoding)
        assert tokenizer_files(copy, 64) == files


def test_ids_are_those_of_tokenizers(shape):
    folder, files = shape
    encoding = load_tokenizer(folder)
    texts = [TEXT, SAMPLE, *TEXT.split(), "a <|eot_id|> <|endoftext|> b", "\n" * 40]
    check_same_ids(encoding, files["tokenizer.json"], texts)
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    source = random.Random(0)
    random_texts = (
        "".join(source.choices("a1 é日。!\n\tの'sX", k=12)) for _ in range(500)
    )
    for text in (TEXT, "12345 67", "日本1234567語", "  9", "x   12", *random_texts):
        ids = encode(encoding, text.encode()).tolist()
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        if "Qwen" not in files["tokenizer_config.json"]:  # Qwen normalizes text
            assert decode(encoding, encode(encoding, text.encode())) == text


def test_a_stored_tokenizer_without_its_files_is_refused(shape):
    stored = json.loads(tokenizer_to_bytes(shape[0]) or b"")
    del stored["files"]
    with pytest.raises(DataError, match=r"lacks the files .* Prepare the store again"):
        tokenizer_from_bytes("stored", json.dumps(stored).encode())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "Unigram", "vocab": []}, "its model is Unigram"),
        ({"type": "WordPiece", "vocab": {}}, "its model is WordPiece"),
        ({"byte_fallback": True}, "SentencePiece's BPE"),
        ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix=</w>"),
        ({"continuing_subword_prefix": "##"}, "continuing_subword_prefix=##"),
        ({"dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_another_kind_of_model_is_refused_by_name(tmp_path, change, reason):
    content = json.loads(write_shape(tmp_path, "llama3")["tokenizer.json"])
    content["model"] |= change
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=reason):
        load_tokenizer(str(tmp_path))


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
LEVEL["trim_offsets"] = False


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([METASPACE], "another way .*Metaspace"),
        ([METASPACE, LEVEL], "another way .*Metaspace"),
        ([LEVEL | {"add_prefix_space": True}], "another way"),
        ([SPLIT | {"pattern": {"Regex": "x*"}}, SPLIT, LEVEL], "another way"),
        ([SPLIT | {"pattern": {"Regex": "("}}] * 2 + [LEVEL], "cannot be used"),
        ([SPLIT | {"pattern": {"Regex": "x*"}}] * 2 + [LEVEL], "matches empty"),
        ([SPLIT | {"pattern": {"Regex": "[a-z&&[b]]"}}] * 2 + [LEVEL], "intersects"),
        (
            [SPLIT | {"pattern": {"Regex": "x"}, "behavior": "Removed"}, LEVEL],
            "Removed",
        ),
        ([], "another way"),
    ],
)
def test_another_way_to_cut_text_is_refused_by_name(tmp_path, steps, reason):
    content = json.loads(write_shape(tmp_path, "llama3")["tokenizer.json"])
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=reason):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Digits", "individual_digits": True}, LEVEL | {"use_regex": True}],
        [{"type": "Digits", "individual_digits": False}, LEVEL | {"use_regex": True}],
        [SPLIT | {"pattern": {"String": "a "}}, LEVEL | {"use_regex": True}],
        [SPLIT | {"pattern": {"String": " "}}, LEVEL],
        [SPLIT | {"pattern": {"Regex": "^ +| +$"}}, LEVEL | {"use_regex": True}],
    ],
)
def test_other_steps_cut_text_as_tokenizers_does(tmp_path, steps):
    content = json.loads(write_shape(tmp_path, "gpt2")["tokenizer.json"])
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    text = json.dumps(content)
    (tmp_path / "tokenizer.json").write_text(text)
    encoding = load_tokenizer(str(tmp_path))
    check_same_ids(encoding, text, [TEXT, SAMPLE, "a  \n  b12 ", "½ ² ١٢ Ⅷ"])


def test_a_folder_of_sentencepiece_alone_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(DataError, match="only a SentencePiece model"):
        load_tokenizer(str(tmp_path))
