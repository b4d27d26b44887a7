"""The configuration of text, tokenizer, rows and batches."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

INT32_MAX = 2**31 - 1  # JAX integers are int32
Count = Annotated[int, Ge(1), Le(INT32_MAX)]
Number = Annotated[int, Ge(0), Le(INT32_MAX)]
RunSeed = Annotated[int, Ge(-(2**31)), Lt(2**32)]  # JAX drops higher bits
Seed = Annotated[int, Ge(0), Lt(2**32)]  # NumPy refuses negative seeds
ByteCount = Annotated[int, Ge(1), Le(2**40)]
Pattern = Annotated[str, Doc("Which files of a folder are read.")]
InputPaths = Annotated[Any, Doc("A file, folder, glob or URL, or a list of them.")]
TextField = Annotated[
    Any,
    Doc(
        "The field of a record that holds its text. a.b is the field b of the field a; "
        "[title, body] joins several fields."
    ),
]
TextSeparator = Annotated[
    str,
    Doc(
        "What joins the texts of several fields; backslash n is the end of a line, "
        "backslash t a tab."
    ),
]
StorePath = Annotated[str | None, Doc("The folder or URL of a token store.")]
Tokenizer = Annotated[
    str,
    Doc(
        "bytes, gpt2, cl100k_base, o200k_base, a rank file, or a folder with "
        "tokenizer.json."
    ),
]
RankFileHash = Annotated[
    str | None, Doc("The SHA-256 hash of a rank file. A rank file requires it.")
]
EndToken = Annotated[
    Number | None,
    Doc(
        "The id after which a document ends in token files of nanoGPT and llm.c. null: "
        "the tokenizer's end-of-text token."
    ),
]

UNNAMED = "unnamed"  # the tokenizer of token files, until the user names it
PUBLISHED = ("gpt2", "cl100k_base", "o200k_base")  # downloaded by tiktoken


def inputs_of(value: object) -> list[str]:
    """Return the paths that the value of `InputPaths` names, as a list."""
    inputs = value if isinstance(value, list) else [value]
    return [str(path) for path in inputs if path not in (None, "")]


class FormatName(StrEnum):
    """The formats that the key `format` can set for all files.

    `text`: the file is one document. `lines`: a record of JSON in each line. `json`: an
    array of records, or records that follow each other. `csv`: a table of text with the
    names of its columns in the first line, also with tabs or semicolons. `parquet` and
    `arrow`: a table. `tar`: samples of WebDataset. `tfrecord` and `array_record`:
    records of text or of `tf.train.Example`.
    """

    text = "text"
    lines = "lines"
    json = "json"
    csv = "csv"
    parquet = "parquet"
    arrow = "arrow"
    tar = "tar"
    tfrecord = "tfrecord"
    array_record = "array_record"


FileFormat = Annotated[
    FormatName | None,
    Doc(
        "How all files hold documents. null: name and content of each file decide; "
        "text reads any valid UTF-8 as text."
    ),
]


class Source(StrEnum):
    """Where the text comes from.

    `python`: the source code of Python's standard library, which every machine that
    runs this program has. `text`: the file or folder of files at `data.path`, encoded
    on first use. `tokens`: the store at `data.path` that `python -m data.prepare` made.
    `megatron`, `nanogpt`, `llmc`: the files of tokens at `data.path` that another
    trainer's tools wrote, which are read where they lie. `mixture`: several stores or
    files of tokens, which `data.sources` lists.
    """

    python = "python"
    text = "text"
    tokens = "tokens"
    megatron = "megatron"
    nanogpt = "nanogpt"
    llmc = "llmc"
    mixture = "mixture"


TOKEN_FILES = (Source.megatron, Source.nanogpt, Source.llmc)


class TokenFormat(StrEnum):
    """How a source of a mixture holds tokens.

    `store`: a store that `python -m data.prepare` made. `megatron`, `nanogpt`, `llmc`:
    files of another trainer's tools.
    """

    store = "store"
    megatron = "megatron"
    nanogpt = "nanogpt"
    llmc = "llmc"


class Packing(StrEnum):
    """How documents become rows.

    `concat`: documents are joined end to end and cut into rows. `best_fit`: a row holds
    as many whole documents as fit. `none`: a row holds one document and padding. With
    `best_fit` and `none`, a document that is longer than a row is cut into pieces.
    """

    concat = "concat"
    best_fit = "best_fit"
    none = "none"


class OnError(StrEnum):
    """What happens to a record or a file that cannot be used.

    `fail`: the command ends with an error. `skip`: the record or file is left out.
    """

    fail = "fail"
    skip = "skip"


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture."""

    path: Annotated[
        str,
        Doc(
            "A token store (a folder, gs://, s3:// or http://), or token files as in "
            "data.path."
        ),
    ] = ""
    weight: Annotated[
        float,
        Ge(0),
        Lt(inf),
        Doc("The share of the rows, relative to the other sources."),
    ] = 1.0
    epochs: Annotated[
        Annotated[float, Gt(0)] | None,
        Doc("How often its rows may be used. null sets no limit."),
    ] = None
    format: Annotated[TokenFormat, Doc("How the source holds tokens.")] = (
        TokenFormat.store
    )


@dataclass(frozen=True)
class WeightChange:
    """The weights of a mixture from one step on. Sources without a weight get 0."""

    step: Annotated[
        Number,
        Doc(
            "The batch number from which the weights hold. skip_batches does not move "
            "it."
        ),
    ] = 0
    weights: Annotated[dict[str, float], Doc("The weight of each source, by name.")] = (
        field(default_factory=dict)
    )


FromStep = Annotated[
    Number | None, Doc("The number of the first batch. skip_batches does not move it.")
]
FromTokens = Annotated[
    Annotated[float, Ge(0), Lt(inf)] | None,
    Doc("The change comes once all earlier batches have this number of positions."),
]


@dataclass(frozen=True)
class BatchChange:
    """The number of rows of a batch, from one step or one number of tokens on."""

    from_step: FromStep = None
    from_tokens: FromTokens = None
    rows: Annotated[Count, Doc("The number of rows in one update.")] = 1


@dataclass(frozen=True)
class LengthChange:
    """The length of rows, from one step or one number of tokens on."""

    from_step: FromStep = None
    from_tokens: FromTokens = None
    length: Annotated[
        Count, Doc("The number of tokens in a row. It divides data.sequence_length.")
    ] = 1


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer, rows and batches. These keys and the seed fix each batch."""

    name: Annotated[str, Doc("The data's part of the default run name.")] = "python"
    source: Annotated[Source, Doc("Where the text comes from.")] = Source.python
    path: Annotated[
        str | None,
        Doc(
            "A file or folder of text; a token store with source=tokens; otherwise "
            "token files: a file, a folder or a pattern, and with source=megatron a "
            "prefix."
        ),
    ] = None
    sources: Annotated[
        dict[str, MixtureSource], Doc("The sources of a mixture, by name.")
    ] = field(default_factory=dict)
    weight_changes: Annotated[
        list[WeightChange], Doc("When the weights of a mixture change, and to what.")
    ] = field(default_factory=list)
    pattern: Pattern = "**/*"
    format: FileFormat = None
    text_field: TextField = "text"
    text_separator: TextSeparator = r"\n\n"
    on_error: Annotated[
        OnError,
        Doc("What to do with files that are not text, and with unusable records."),
    ] = OnError.fail
    validation: Annotated[
        float,
        Gt(0),
        Lt(1),
        Doc(
            "The fraction of documents to hold out, such as 0.1. Of a single file it "
            "is the end."
        ),
    ] = 0.1
    tokenizer: Tokenizer = "bytes"
    tokenizer_sha256: RankFileHash = None
    end_token: EndToken = None
    sequence_length: Annotated[Count, Doc("T: the number of tokens in a row.")] = 256
    batch_size: Annotated[
        Count, Doc("B: the number of rows in one update, over all devices.")
    ] = 16
    batch_schedule: Annotated[
        list[BatchChange],
        Doc(
            "When batches get another number of rows. batch_size holds before the "
            "first change, and for validation."
        ),
    ] = field(default_factory=list)
    sequence_schedule: Annotated[
        list[LengthChange],
        Doc(
            "When rows are shorter than sequence_length, which holds before the first "
            "change, and for validation."
        ),
    ] = field(default_factory=list)
    packing: Annotated[Packing, Doc("How documents become rows.")] = Packing.concat
    document_mask: Annotated[
        bool, Doc("Attention does not cross the boundaries of documents.")
    ] = True
    document_start: Annotated[
        bool | None,
        Doc(
            "The first input of each document is a beginning token, so that the "
            "document's first token is a target too. null means true in a new run, and "
            "in an existing run the value that it began with."
        ),
    ] = None
    cache_dir: Annotated[
        str | None,
        Doc("The folder of cached token stores. null means ~/.cache/longhaul."),
    ] = None
    prefetch: Annotated[Count, Doc("The number of batches to read ahead.")] = 2
    skip_batches: Annotated[
        list[Number], Doc("Batches to leave out: [first,last, ...].")
    ] = field(default_factory=list)

    @property
    def reads_token_files(self) -> bool:
        """Whether tokens are read from files of another trainer's tools."""
        formats = [source.format for source in self.sources.values()]
        is_mixed = any(format is not TokenFormat.store for format in formats)
        return self.source in TOKEN_FILES or is_mixed

    @property
    def has_beginning_tokens(self) -> bool:
        """Whether the first input of each document is a beginning token."""
        return self.document_mask and self.document_start is not False
