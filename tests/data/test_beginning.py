"""Documents and prompts begin with the right token for each kind of tokenizer."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.batch import Batch
from data.batches import Order, validation_batches
from data.beginning import Beginning, beginning_of, beginning_token
from data.catalog import FORMATS, text_store
from data.config import DataConfig, MixtureSource, Packing, Source
from data.encoding import FolderEncoding, encode, fingerprint
from data.errors import DataError
from data.prepare_config import PrepareConfig
from data.sources import open_sources
from data.token_store.build import prepare_store
from data.tokenizer import load_tokenizer
from data.tokenizer_json import byte_names

NAMES = ["<s>", "</s>", "<cls>"]


def template(*names: str) -> dict:
    """Return a post-processor that adds the names before a text, and </s> after it."""
    items = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (*names, "</s>")]
    items.insert(len(names), {"Sequence": {"id": "A", "type_id": 0}})
    ids = {n: {"id": n, "ids": [256 + i], "tokens": [n]} for i, n in enumerate(NAMES)}
    return {"type": "TemplateProcessing", "single": items, "special_tokens": ids}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 257], "cls": ["<cls>", 258]}


def write_folder(folder: Path, post_processor: dict | None, **settings) -> str:
    """Write a tokenizer of bytes with the ids 256 to 258 for NAMES."""
    added = [
        {"content": n, "id": 256 + i, "special": True} for i, n in enumerate(NAMES)
    ]
    content = {
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "post_processor": post_processor,
        "model": {
            "type": "BPE",
            "vocab": {name: i for i, name in enumerate(byte_names())},
            "merges": [],
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("post_processor", "settings", "expected"),
    [
        (None, {}, None),
        (BYTE_LEVEL, {"bos_token": "<s>"}, None),  # the token is named, but not added
        (template(), {}, None),  # it adds a token only after the text
        (template("<s>"), {}, 256),
        (template("<cls>", "<s>"), {}, 256),  # <s> is directly before the text
        (template("</s>"), {}, 257),
        ({"type": "Sequence", "processors": [BYTE_LEVEL, template("<s>")]}, {}, 256),
        (ROBERTA, {}, 258),
        (BYTE_LEVEL, {"bos_token": "<s>", "add_bos_token": True}, 256),
        (None, {"bos_token": {"content": "<cls>"}, "add_bos_token": True}, 258),
        (None, {"bos_token": "<s>", "add_bos_token": False}, None),
        (template("<s>"), {"bos_token": "<cls>", "add_bos_token": True}, 256),
    ],
)
def test_an_imported_tokenizer_begins_documents_with_the_token_that_it_adds(
    tmp_path, post_processor, settings, expected
):
    encoding = load_tokenizer(write_folder(tmp_path / "t", post_processor, **settings))
    assert isinstance(encoding, FolderEncoding)
    assert encoding.eot_token == 257
    assert encoding.bos_token == expected
    assert beginning_token(encoding) == (257 if expected is None else expected)
    # The tokens of a store do not depend on this token.
    plain = load_tokenizer(write_folder(tmp_path / "plain", None))
    assert fingerprint(encoding) == fingerprint(plain)
    assert encode(encoding, b"abc").tolist() == [97, 98, 99]


@pytest.mark.parametrize("token", ["<unknown>", 7])
def test_a_token_that_the_vocabulary_lacks_is_refused(tmp_path, token):
    post_processor = template("<s>")
    post_processor["special_tokens"]["<s>"]["ids"] = [300]
    for folder in (
        write_folder(tmp_path / "a", post_processor),
        write_folder(tmp_path / "b", None, bos_token=token, add_bos_token=True),
    ):
        with pytest.raises(DataError, match="cannot be used"):
            load_tokenizer(folder)


def test_prompts_begin_as_documents_do_in_training(tmp_path):
    config = DataConfig()
    no_mask = dataclasses.replace(config, document_mask=False)
    no_start = dataclasses.replace(config, document_start=False)
    built_in = load_tokenizer("bytes")
    with_bos = load_tokenizer(write_folder(tmp_path / "adds", template("<s>")))
    plain = load_tokenizer(write_folder(tmp_path / "plain", None))
    assert beginning_of(config, built_in) == Beginning(256, in_prompts=False)
    assert beginning_of(config, with_bos) == Beginning(256, in_prompts=True)
    assert beginning_of(config, plain) == Beginning(257, in_prompts=False)
    for encoding, end in ((built_in, 256), (with_bos, 257), (plain, 257)):
        for variant in (no_mask, no_start):
            assert beginning_of(variant, encoding) == Beginning(end, in_prompts=False)
    assert Beginning(5, True).before([1, 2]) == [5, 1, 2]
    assert Beginning(5, False).before([1, 2]) == [1, 2]
    assert Beginning(5, True).before([]) == Beginning(5, False).before([]) == [5]


TEXTS = ["Zebra eats.", "Zebra sleeps in the shade of a tree.", "Z", "Zebra " * 9]


def prepare(folder: Path, tokenizer: str, texts=TEXTS) -> DataConfig:
    """Prepare a store, and return a config that reads it."""
    folder.mkdir()
    lines = [json.dumps({"text": text, "id": str(i)}) for i, text in enumerate(texts)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    input_path = str(folder / "in.jsonl")
    output = str(folder / "store")
    prepare_store(
        PrepareConfig(input_path, output, validation=0, tokenizer=tokenizer), FORMATS
    )
    return DataConfig(
        source=Source.tokens,
        path=output,
        sequence_length=16,
        batch_size=2,
        cache_dir=str(folder / "cache"),
    )


@pytest.mark.parametrize("kept", ["memory", "disk"], indirect=True)
@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("tokenizer", ["bytes", "adds", "plain"])
def test_each_document_of_a_store_begins_with_the_token(
    tmp_path, kept, small_chunks, tokenizer, packing
):
    begin, end, name = {
        "bytes": (256, 256, "bytes"),
        "adds": (256, 257, write_folder(tmp_path / "adds", template("<s>"))),
        "plain": (257, 257, write_folder(tmp_path / "plain", None)),
    }[tokenizer]
    config = prepare(tmp_path / "data", name)
    config = dataclasses.replace(config, packing=packing)
    sources = open_sources(config, text_store, to_evaluate=False)
    documents = sorted(documents_of([*validation_batches(sources, config)], begin))
    assert documents == sorted([*text.encode(), end] for text in TEXTS)


def documents_of(batches: list[Batch], begin: int) -> list[list[int]]:
    """Return the targets of each document; its pieces must be in order."""
    documents: list[list[int]] = []
    batch = Batch(*map(np.concatenate, zip(*batches, strict=True)))
    for inputs, targets, segments, _ in zip(*batch, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            mask = segments == segment
            first_input = int(inputs[mask][0])
            piece = targets[mask].tolist()
            np.testing.assert_array_equal(inputs[mask][1:], targets[mask][:-1])
            if first_input == begin:
                documents.append(piece)
            else:  # It continues the last document that ends with this input.
                ends = [d for d in documents if d[-1] == first_input]
                ends[-1] += piece
    return documents


def test_documents_without_end_of_text_follow_the_same_rule(tmp_path):
    """A single text has no end-of-text token, and continues from row to row."""
    (tmp_path / "one.txt").write_text("abcdefghij" * 20)
    config = DataConfig(
        source=Source.text,
        path=str(tmp_path / "one.txt"),
        sequence_length=16,
        batch_size=2,
        cache_dir=str(tmp_path / "cache"),
    )
    for packing in Packing:
        config = dataclasses.replace(config, packing=packing)
        sources = open_sources(config, text_store)
        assert not sources.has_many_documents
        (rows,) = Order(sources, config, 0).rows.values()
        batch = rows.read(np.arange(len(rows)))
        order = np.argsort([rows.pieces(i)[0].start for i in range(len(rows))])
        is_text = batch.targets[order] >= 0
        inputs = batch.inputs[order][is_text]
        targets = batch.targets[order][is_text]
        text = [*("abcdefghij" * 18).encode()][: len(targets)]
        assert targets.tolist() == text
        assert inputs.tolist() == [256, *text[:-1]]


def test_all_stores_of_a_mixture_use_one_beginning_token(tmp_path):
    """One tokenizer of the two does not say that the token is added."""
    bos_folder = write_folder(tmp_path / "adds", template("<s>"))
    plain_folder = write_folder(tmp_path / "plain", None)
    plain_config = prepare(tmp_path / "without", plain_folder)
    bos_config = prepare(tmp_path / "added", bos_folder)
    for names in (("without", "added"), ("added", "without")):
        paths = {"without": plain_config.path or "", "added": bos_config.path or ""}
        sources = {name: MixtureSource(paths[name], 1.0) for name in names}
        changes = {"source": Source.mixture, "path": None, "sources": sources}
        config = dataclasses.replace(bos_config, **changes)
        batch = Order(
            open_sources(config, text_store, to_evaluate=False), config, 0
        ).read(0)
        assert batch.inputs[batch.positions == 0].tolist().count(256) > 1
        assert not (batch.inputs == 257).any()
