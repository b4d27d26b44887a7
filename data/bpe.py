"""Learn a byte-level BPE as a rank file, which `data.tokenizer` loads.

Hugging Face's `tokenizers` learns the vocabulary, and tiktoken encodes with it. Both
split text by the same pattern, so their ids agree. The file depends on the texts and
the vocabulary size, but not on the order of the texts. The file holds no special
tokens. The name of a special token in a text is treated as plain text.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from data.errors import DataError
from data.text.classify import classify
from data.text.documents import read_documents
from data.text.files import Format, missing_package_error, units_of
from data.text.find import find_files
from data.text.records import ReadSettings, Record
from data.tokenizer import RANK_FILE_PATTERN
from data.tokenizer_json import byte_names, convert_for_oniguruma

NUM_BYTES = 256
PIECE_LENGTH = 2**14  # in characters, each of which costs `tokenizers` 140 bytes
HELD_OUT_EVERY = 20


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """Learn `vocab_size` tokens from texts, and return the content of a rank file.

    The 256 single bytes come first, in the order of GPT-2's file. They count towards
    `vocab_size`; the <|endoftext|> that `load_tokenizer` adds does not. A pair that
    occurs only once is not merged. Raises DataError if the texts hold too few pairs,
    and MissingPackageError if `tokenizers` is not installed.
    """
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise missing_package_error("tokenizers", error) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(convert_for_oniguruma(RANK_FILE_PATTERN)), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    names = byte_names()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=names,
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces_of(texts), trainer)
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) < vocab_size:
        raise DataError(
            f"vocab_size={vocab_size}: the pairs that occur twice in the text make "
            f"only {len(vocabulary)} tokens, including the {NUM_BYTES} single "
            f"bytes. Give more text, or at most vocab_size={len(vocabulary)}"
        )
    lines = []
    byte_of = {name: byte for byte, name in enumerate(names)}
    for name in sorted(vocabulary, key=vocabulary.__getitem__):
        token = bytes(byte_of[character] for character in name)
        lines.append(b"%s %d\n" % (base64.b64encode(token), vocabulary[name]))
    return b"".join(lines)


def pieces_of(texts: Iterable[str]) -> Iterator[str]:
    """Yield pieces of at most `PIECE_LENGTH` characters, cut at line ends if possible.

    A lone surrogate, which JSON can hold but UTF-8 cannot, becomes a question mark.
    """
    for text in texts:
        start = 0
        while start < len(text):
            limit = start + PIECE_LENGTH
            end = limit
            if limit < len(text):
                end = text.rfind("\n", start, limit) + 1 or limit
            yield text[start:end].encode("utf-8", "replace").decode()
            start = end


def hold_out(texts: Iterable[str], held_out_pieces: list[str]) -> Iterator[str]:
    """Yield pieces of texts; append every twentieth to `held_out_pieces` instead."""
    for index, piece in enumerate(pieces_of(texts)):
        if index % HELD_OUT_EVERY == 1:  # 0 would hold out a tiny text's only piece
            held_out_pieces.append(piece)
        else:
            yield piece


def texts_of(
    inputs: Sequence[str],
    max_bytes: int,
    settings: ReadSettings,
    formats: Sequence[Format],
    pattern: str = "**/*",
) -> Iterator[str]:
    """Yield texts of at most `max_bytes` in all from inputs, and skip bad records.

    An invalid byte of a text becomes U+FFFD.

    If the inputs are larger, the units that are read are spread evenly over it. The
    choice of units depends only on the files' names and sizes, and on `max_bytes`.
    Raises DataError if an input does not exist, or a file cannot be read.
    """
    files = classify(find_files(inputs, pattern), settings, formats).files
    reading = replace(settings, keep_invalid_utf8=True)
    units = [unit for file in files for unit in units_of(file)]
    stride = max(1, -(-sum(file.size for file in files) // max_bytes))
    for unit in (unit for start in range(stride) for unit in units[start::stride]):
        for record in read_documents(unit, reading):
            if isinstance(record, Record):
                text = record.text[:max_bytes]
                yield text.decode("utf-8", "replace")
                max_bytes -= len(text)
                if not max_bytes:
                    return
