"""Write our tokenizers as tokenizer.json, which transformers and others load.

All our tokenizers are byte-level BPE: a vocabulary of byte strings by rank, and a
pattern that splits text into pieces. The file represents each byte by a character,
as GPT-2's file does, and lists the merges that the ranks imply.
"""

import itertools
import json
import re
from typing import Any

import tiktoken

from data.encoding import BYTES, END_OF_TEXT, FolderEncoding, encode, short_pieces
from data.errors import DataError

_JSON = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
# The files of an imported tokenizer that an export writes as they were.
FILES = (
    *(_JSON, _SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
POSSESSIVE_COUNT = r"\{\d+(,\d*)?\}\+"  # a possessive repetition such as {1,3}+
# Text in many scripts, for which an exported tokenizer must give the same ids as ours.
SAMPLE = """The quick brown fox — it's 12,345.67 km away, isn't it?\tI'LL SAY\r\n\n\n
Füße, œuvre, naïve, Ångström; Съешь ещё этих булок; Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία
נקודה, العربية ١٢٣٤٥, हिन्दी में १२३, ภาษาไทย ๑๒๓, தமிழ்
中文字符，日本語のテキスト、한국어 문장 １２３
👩‍👩‍👧‍👦 🏳️‍🌈 é é    indented  \u00a0\u2003\u3000 for(i=0;i<10;++i){a+=i;}   \n   """


def tokenizer_json(encoding: tiktoken.Encoding) -> dict[str, Any]:
    """Return the content of tokenizer.json for a tokenizer that was not imported."""
    ranks = encoding._mergeable_ranks
    names = byte_names()

    def name(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    # `tokenizers` numbers added tokens from the end of the vocabulary and ignores their
    # ids in the file. Therefore, special tokens with other ids go into the vocabulary.
    pairs = sorted(encoding._special_tokens.items(), key=lambda pair: pair[1])
    special = dict(pairs)
    max_rank = max(ranks.values())
    added = [rank for rank in special.values() if rank > max_rank]
    are_consecutive = added == [*range(max_rank + 1, max_rank + 1 + len(added))]
    in_vocab = {t: rank for t, rank in pairs if rank < max_rank or not are_consecutive}
    pattern = {"Regex": convert_for_oniguruma(encoding._pat_str)}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [] if encoding.name == BYTES else [split | {"pattern": pattern}]
    options = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    byte_level = {"type": "ByteLevel", **options}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": rank,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, rank in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A piece that equals a token becomes that token, as in tiktoken.
            "ignore_merges": True,
            "vocab": {name(token): rank for token, rank in ranks.items()} | in_vocab,
            "merges": [[name(a), name(b)] for a, b in merges_of(ranks)],
        },
    }


def tokenizer_files(
    encoding: tiktoken.Encoding, length: int, bos_token: str = END_OF_TEXT
) -> dict[str, str]:
    """Return the content of each file of an exported tokenizer, by name.

    The files of an imported tokenizer are as they were. The other arguments are those
    of `tokenizer_config`, which makes the settings that the tokenizer lacks.
    """
    if isinstance(encoding, FolderEncoding):
        files = {name: encoding.files[name] for name in FILES if name in encoding.files}
    else:
        files = {_JSON: json.dumps(tokenizer_json(encoding), ensure_ascii=False)}
    if _SETTINGS not in files:
        files[_SETTINGS] = (
            json.dumps(tokenizer_config(length, bos_token), indent=2) + "\n"
        )
    return files


def tokenizer_config(length: int, bos_token: str = END_OF_TEXT) -> dict[str, Any]:
    """Return the content of tokenizer_config.json.

    `length` is the row length, and `bos_token` the name of the token before a text.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos_token,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }


def check_same_ids(encoding: tiktoken.Encoding, content: str, texts: list[str]) -> None:
    """Check that a tokenizer.json with this content gives our ids for some texts.

    Raises DataError, which shows the first ids that differ, or ImportError if
    `tokenizers` is not installed.
    """
    import tokenizers

    def export_error(reason: str) -> DataError:
        return DataError(
            f"the tokenizer {encoding.name} cannot be written as tokenizer.json: "
            f"{reason}. Leave it out with tokenizer=false"
        )

    exported = tokenizers.Tokenizer.from_str(content)
    exported.encode_special_tokens = True  # a name of a special token is text
    exported.no_truncation()
    exported.no_padding()
    for token, rank in encoding._special_tokens.items():
        if (exported_id := exported.token_to_id(token)) not in (None, rank):
            raise export_error(f"{token} would be {exported_id} instead of {rank}")
    # Compare single pieces, because `encode` cuts long text and ids may differ at cuts.
    for piece in (piece for text in texts for piece in short_pieces(text)):
        our_ids = encode(encoding, piece.encode()).tolist()
        exported_ids = exported.encode(piece, add_special_tokens=False).ids
        if our_ids != exported_ids:
            pairs = zip(our_ids, exported_ids, strict=False)
            index = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
            near = encoding.decode_bytes(our_ids[max(0, index - 3) : index + 5])
            raise export_error(
                f"that gives other ids near {near!r}, {exported_ids[index : index + 5]}"
                f" instead of {our_ids[index : index + 5]}"
            )


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return in rank order, for each token that merges make, the pair that makes it."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            lowest_pair = min(pairs, key=lambda pair: ranks.get(pair, rank))
            if ranks.get(lowest_pair, rank) >= rank:
                break  # no merges make this token
            i = pairs.index(lowest_pair)
            parts[i : i + 2] = [lowest_pair]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def convert_for_oniguruma(pattern: str) -> str:
    """Convert a tiktoken pattern for Oniguruma, the engine of `tokenizers`.

    Oniguruma reads x{1,3}+ as (x{1,3})+, which would make one piece of any run of
    digits. tiktoken's engine reads + as possessive, which has no effect at the end of a
    branch, so the + is dropped. Oniguruma's $ matches at the end of any line, but after
    \\s++ no line end is left, so $ matches only at the end of the text. Source:
    Oniguruma, doc/RE: "{n,m}+ [...] are possessive op. in ONIG_SYNTAX_JAVA only".
    """
    return re.sub(POSSESSIVE_COUNT, lambda match: match[0][:-1], pattern)


def byte_names() -> list[str]:
    """Return the character that stands for each byte.

    A printable byte of Latin-1 is its own character. The other bytes, in order, are the
    characters from U+0100 on. Source: GPT-2, src/encoder.py, bytes_to_unicode.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    codes = {byte: 256 + i for i, byte in enumerate(unprintable)}
    return [chr(codes.get(byte, byte)) for byte in range(256)]
