"""Which text becomes which batches."""

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where the text comes from.

    `python`: the source code of Python's own standard library, on every machine
    that runs this program. `text`: the file or folder of files at `data.path`.
    """

    python = "python"
    text = "text"


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer, rows and batches. Batch s is a function of this and the seed."""

    name: str = "python"
    source: Source = Source.python
    path: str | None = None  # file or folder, for source=text
    pattern: str = "**/*"  # which files of a folder
    validation: float = 0.1  # part held out: by document; of a single file its end
    tokenizer: str = "bytes"  # gpt2, cl100k_base, o200k_base, or a rank file's path
    tokenizer_sha256: str | None = None  # required with a rank file
    sequence_length: int = 256  # T: tokens in a row
    batch_size: int = 16  # B: rows in the global batch of one step
    document_mask: bool = True  # attention stays inside a document
    cache_dir: str | None = None  # of token stores; null: ~/.cache/longhaul
    prefetch: int = 2  # batches read ahead

    def mistakes(self) -> list[tuple[str, object, str]]:
        """List what is wrong as (field, value, rule and remedy)."""
        found: list[tuple[str, object, str]] = []
        for field in ("sequence_length", "batch_size", "prefetch"):
            if getattr(self, field) < 1:
                found.append((field, getattr(self, field), "must be at least 1"))
        if not 0 < self.validation < 1:
            found.append(
                ("validation", self.validation, "must lie between 0 and 1, say 0.1")
            )
        if self.source is Source.text and not self.path:
            found.append(
                ("path", self.path, "must name a file or a folder with data=text")
            )
        if self.source is Source.python and self.path:
            found.append(
                ("path", self.path, "is not read by data=python; add data=text")
            )
        return found
