"""The configuration of `python -m data.prepare`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le, Lt
from typing_extensions import Doc

from data.config import (
    ByteCount,
    FileFormat,
    InputPaths,
    OnError,
    Pattern,
    RankFileHash,
    TextField,
    TextSeparator,
    Tokenizer,
    inputs_of,
)


@dataclass(frozen=True)
class PrepareConfig:
    """Keys of `python -m data.prepare`, which converts text to a token store."""

    input: InputPaths = None
    output: Annotated[
        str | None, Doc("The folder of the token store: a path, gs:// or s3://.")
    ] = None
    pattern: Pattern = "**/*"
    format: FileFormat = None
    text_field: TextField = "text"
    text_separator: TextSeparator = r"\n\n"
    id_field: Annotated[
        str | None,
        Doc(
            "The field of a record that identifies it. null: file and position "
            "identify it."
        ),
    ] = None
    validation: Annotated[
        float,
        Ge(0),
        Lt(1),
        Doc(
            "The fraction of documents to hold out, such as 0.01. Of a single text it "
            "is the end. 0 holds out nothing."
        ),
    ] = 0.01
    tokenizer: Tokenizer = "bytes"
    tokenizer_sha256: RankFileHash = None
    on_error: Annotated[
        OnError, Doc("What to do with a record that cannot be used.")
    ] = OnError.fail
    keep_invalid_utf8: Annotated[
        bool, Doc("Keep invalid bytes of text files, one token each.")
    ] = False
    max_record_bytes: Annotated[ByteCount, Doc("Longer records cannot be used.")] = (
        2**26
    )
    workers: Annotated[
        Annotated[int, Ge(1), Le(4096)] | None,
        Doc("The number of processes. null: as many as there are cores."),
    ] = None
    work_dir: Annotated[
        str | None,
        Doc(
            "The folder of unfinished parts. null: next to output, or the cache folder."
        ),
    ] = None

    @property
    def inputs(self) -> list[str]:
        """The inputs as a list."""
        return inputs_of(self.input)
