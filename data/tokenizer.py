"""Load a tokenizer by name: "bytes", a published one, a rank file or a folder.

Only a tokenizer that tiktoken publishes is downloaded.
"""

import base64
import hashlib
import json
from pathlib import Path

import tiktoken

from data.config import PUBLISHED
from data.encoding import BYTES, END_OF_TEXT, FolderEncoding
from data.errors import DataError
from data.storage import check_regular
from data.tokenizer_checks import check_pattern, checked_ranks, reason_of
from data.tokenizer_folder import MALFORMED, load_folder

# Rank files hold no pattern. This is the pattern of cl100k_base and of Llama 3's file.
# Source: tiktoken 0.14, tiktoken_ext/openai_public.py.
RANK_FILE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def load_tokenizer(name: str, sha256: str | None = None) -> tiktoken.Encoding:
    """Load a tokenizer by name.

    `name` is "bytes" (ids 0..255 are the bytes, 256 is <|endoftext|>), one of
    `PUBLISHED` (downloaded on first use), a folder with tokenizer.json, or the path of
    a tiktoken rank file. A rank file requires its SHA-256 in hexadecimal, and
    <|endoftext|> gets the id after its last rank. Raises DataError if the vocabulary is
    missing, damaged, or cannot be downloaded.
    """
    if name == BYTES:
        return tiktoken.Encoding(
            name=BYTES,
            pat_str=r"(?s:.)",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    if is_tokenizer_folder(name):
        return load_folder(name, sha256)
    if name not in PUBLISHED:
        return _load_rank_file(name, sha256)
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise DataError(
            f"tokenizer {name}: its vocabulary is neither in tiktoken's cache nor "
            f"can it be downloaded ({type(error).__name__}: {error}). Run once where "
            f"there is a network and copy the folder that TIKTOKEN_CACHE_DIR names, "
            f"name a local rank file, or take the tokenizer bytes, which needs none"
        ) from error


def _load_rank_file(name: str, sha256: str | None) -> tiktoken.Encoding:
    path = Path(name).expanduser()
    try:
        check_regular(path)
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"tokenizer {name}: is not one of {', '.join((BYTES, *PUBLISHED))}, "
            f"nor a folder, nor a readable rank file ({error}). Name one of these"
        ) from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != str(sha256).lower():
        raise DataError(
            f"tokenizer {path}: its SHA-256 is {actual}, but the config gives "
            f"{sha256}. The file is damaged or a different one: fetch it again, or "
            f"correct the hash"
        )
    return tokenizer_from_bytes(str(path), content)


def tokenizer_from_bytes(name: str, content: bytes) -> tiktoken.Encoding:
    """Return the tokenizer of a rank file's content, or of `tokenizer_to_bytes`.

    Raises DataError if the content is malformed, or if an older version wrote it.
    """
    digest = hashlib.sha256(content).hexdigest()
    try:
        if content.startswith(b"{"):
            arguments = json.loads(content)
            pairs = ((_token(token), rank) for token, rank in arguments.pop("ranks"))
            ranks = checked_ranks(pairs, arguments["special_tokens"])
            check_pattern(arguments["pat_str"])
            if "files" not in arguments:
                raise DataError(
                    f"tokenizer {name}: lacks the files of the folder that it comes "
                    f"from, which this version needs. Prepare the store again"
                )
            return FolderEncoding(**arguments, mergeable_ranks=ranks)
        lines = (line.split() for line in content.splitlines() if line)
        ranks = checked_ranks(((_token(token), int(rank)) for token, rank in lines), {})
        return tiktoken.Encoding(
            name=f"{Path(name).name}:{digest[:12]}",
            pat_str=RANK_FILE_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: max(ranks.values()) + 1},
        )
    except MALFORMED as error:
        raise DataError(
            f"tokenizer {name}: is not a tiktoken rank file ({reason_of(error)}). "
            f"Each line must hold a token in base64 and its rank"
        ) from error


def _token(text: str | bytes) -> bytes:
    return base64.b64decode(text, validate=True)


def tokenizer_to_bytes(name: str) -> bytes | None:
    """Return what `tokenizer_from_bytes` needs, which a prepared store keeps.

    It is the content of a rank file, or JSON for a folder. The result is None if the
    name alone is enough to load the tokenizer.
    """
    if name == BYTES or name in PUBLISHED:
        return None
    if not is_tokenizer_folder(name):
        return Path(name).expanduser().read_bytes()
    encoding = load_tokenizer(name)
    assert isinstance(encoding, FolderEncoding)
    arguments = encoding.__getstate__()
    ranks = sorted(arguments.pop("mergeable_ranks").items(), key=lambda pair: pair[1])
    arguments["ranks"] = [
        (base64.b64encode(token).decode(), rank) for token, rank in ranks
    ]
    return json.dumps(arguments).encode()


def is_tokenizer_folder(name: str) -> bool:
    """Return whether a tokenizer's name is the path of a folder."""
    return name not in (BYTES, *PUBLISHED) and Path(name).expanduser().is_dir()
