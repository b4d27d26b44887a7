"""Find the token files of other trainers, and check what they say of themselves.

- Megatron: `<prefix>.idx` lists the sequences and documents of `<prefix>.bin`.
- nanoGPT: a `.bin` file of uint16, without a header.
- llm.c: a `.bin` file of uint16 or uint32 after a header of 256 int32.

Sources: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py at 00caa53a;
karpathy/nanoGPT, prepare.py of openwebtext; karpathy/llm.c, dev/data/data_common.py
at 16635d41.
"""

import glob
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data.config import DataConfig, Source
from data.errors import DataError
from data.storage import check_regular, is_remote, local_path

Content = TypeVar("Content")

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, two counts
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLMC_HEADER_BYTES = 256 * 4
# Magic number and version -> the sizes of a token in bytes that may follow.
_LLMC_SIZES = {(20240520, 1): (2,), (20240520, 2): (2, 4), (20240801, 7): (4,)}


class TokenFile(NamedTuple):
    """A flat array of tokens in a file.

    path: a local file.
    dtype: an integer dtype, little-endian.
    first_byte: where the tokens begin.
    num_tokens: they reach to the end of the file.
    """

    path: Path
    dtype: np.dtype
    first_byte: int
    num_tokens: int


class TokenFiles(NamedTuple):
    """Files whose tokens are joined in this order.

    files: at least one.
    ends: int64, the end of each document in the joined tokens, ascending; documents
        without tokens repeat the previous end. None if tokens mark the ends.
    """

    files: tuple[TokenFile, ...]
    ends: np.ndarray | None = None

    @property
    def bounds(self) -> np.ndarray:
        """The joined start of each file, then the end: int64 [files + 1]."""
        return np.cumsum([0, *(file.num_tokens for file in self.files)], dtype=np.int64)


def find_token_files(config: DataConfig) -> TokenFiles:
    """Read the headers and indices of the files that a config names.

    `data.path` is a file, a folder or a pattern; Megatron's files are named without
    their endings. Raises DataError if there is no file, or a file is damaged.
    """
    suffix = ".idx" if config.source is Source.megatron else ".bin"
    paths = _find_paths(config.path or "", suffix)
    if config.source is Source.megatron:
        pairs = [_read(path, _read_megatron) for path in paths]
        files = TokenFiles(tuple(file for file, _ in pairs))
        starts = files.bounds[:-1].tolist()
        ends = [ends + start for (_, ends), start in zip(pairs, starts, strict=True)]
        return files._replace(ends=np.concatenate(ends))
    read = _read_nanogpt if config.source is Source.nanogpt else _read_llmc
    return TokenFiles(tuple(_read(path, read) for path in paths))


def _find_paths(location: str, suffix: str) -> list[Path]:
    """Return the files with this suffix that a location names, by their names."""
    if is_remote(location):
        raise DataError(
            f"{location}: only local and mounted files are read in place. Mount it, or "
            f"copy the files"
        )
    path = local_path(location)
    if path.is_dir():
        paths = sorted(path.glob(f"*{suffix}"))
    else:
        # Megatron names a pair without its endings.
        if suffix == ".idx":
            path = path.with_name(path.name.removesuffix(".bin").removesuffix(suffix))
            path = path.with_name(path.name + suffix)
        paths = [path]
        if glob.has_magic(str(path)):
            root = Path(path.anchor)
            paths = sorted(root.glob(str(path.relative_to(root))))
    if not paths:
        raise DataError(f"{location}: there is no file *{suffix}. Correct the path")
    return paths


def _read(path: Path, read: Callable[[Path], Content]) -> Content:
    """Call `read`, and turn its ValueError and OSError into a DataError."""
    try:
        check_regular(path)
        return read(path)
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}). Correct the path"
        raise DataError(f"{error.filename or path}: {reason}") from error
    except ValueError as error:
        reason = f"{error}. Bring back the file from a copy, or name its own format"
        raise DataError(f"{path}: {reason}") from error


def _read_megatron(path: Path) -> tuple[TokenFile, np.ndarray]:
    """Read an index; return its file of tokens, and the end of each document."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_MEGATRON_HEADER.size)
        if not header.startswith(_MEGATRON_MAGIC):
            raise ValueError("is no index of Megatron: it does not begin with MMIDIDX")
        if len(header) < _MEGATRON_HEADER.size:
            raise ValueError(f"is truncated: it has {size} bytes")
        _, version, code, num_sequences, num_bounds = _MEGATRON_HEADER.unpack(header)
        if version != 1:
            raise ValueError(f"has version {version}, but this program reads version 1")
        if code not in _MEGATRON_DTYPES:
            raise ValueError(f"has the dtype code {code}, which is none of integers")
        needed = len(header) + 12 * num_sequences + 8 * num_bounds
        if size != needed:
            raise ValueError(
                f"has {size:,} bytes, but {num_sequences:,} sequences of text and "
                f"{num_bounds:,} bounds of documents need {needed:,}"
            )
        lengths = np.fromfile(file, "<i4", num_sequences)
        pointers = np.fromfile(file, "<i8", num_sequences)
        bounds = np.fromfile(file, "<i8", num_bounds)
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    if (lengths < 0).any():
        raise ValueError(f"sequence {np.argmax(lengths < 0)} has a negative length")
    starts = np.zeros(num_sequences + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if len(gaps := np.flatnonzero(pointers != starts[:-1] * dtype.itemsize)):
        raise ValueError(f"sequence {gaps[0]} does not begin where the one before ends")
    is_whole = num_bounds > 0 and bounds[0] == 0 and bounds[-1] == num_sequences
    if not is_whole or (np.diff(bounds) < 0).any():
        last = f"from 0 to {num_sequences}, the number of sequences"
        raise ValueError(f"the bounds of its documents do not ascend {last}")
    tokens = path.with_suffix(".bin")
    check_regular(tokens)
    if (actual := tokens.stat().st_size) != starts[-1] * dtype.itemsize:
        raise ValueError(
            f"does not belong to {tokens.name}, which has {actual:,} bytes: it lists "
            f"{starts[-1]:,} tokens of {dtype.itemsize} bytes"
        )
    return TokenFile(tokens, dtype, 0, int(starts[-1])), starts[bounds[1:]]


def _read_nanogpt(path: Path) -> TokenFile:
    """Return the tokens of a file without a header."""
    num_tokens, remainder = divmod(path.stat().st_size, 2)
    if remainder or not num_tokens:
        raise ValueError(
            f"has {path.stat().st_size:,} bytes, but tokens of nanoGPT take 2 each"
        )
    return TokenFile(path, np.dtype("<u2"), 0, num_tokens)


def _read_llmc(path: Path) -> TokenFile:
    """Return the tokens that follow a header."""
    size = path.stat().st_size - _LLMC_HEADER_BYTES
    if size < 0:
        raise ValueError(
            f"is shorter than llm.c's header of {_LLMC_HEADER_BYTES} bytes"
        )
    magic, version, num_tokens = np.fromfile(path, "<i4", 3).tolist()
    if (magic, version) not in _LLMC_SIZES:
        known = ", ".join(f"{magic} version {v}" for magic, v in _LLMC_SIZES)
        found = f"{magic} version {version}"
        raise ValueError(f"begins with the number {found}, but llm.c's are {known}")
    sizes = [s for s in _LLMC_SIZES[magic, version] if s * num_tokens == size]
    if not sizes or num_tokens < 1:
        raise ValueError(
            f"has {size:,} bytes of tokens, but its header announces {num_tokens:,} "
            f"tokens of {' or '.join(map(str, _LLMC_SIZES[magic, version]))} bytes"
        )
    return TokenFile(path, np.dtype(f"<u{sizes[0]}"), _LLMC_HEADER_BYTES, num_tokens)
