"""The formats of files that are read, and the stores that are made on first use.

Commands and the start of a run import this module, and hand its values to the code that
reads.
"""

from collections.abc import Callable

from data.config import TOKEN_FILES, DataConfig
from data.text.delimited import CSV
from data.text.files import Format
from data.text.json_formats import JSON, LINES
from data.text.plain_text import TEXT
from data.text.record_files import ARRAY_RECORD, TFRECORD
from data.text.tables import ARROW, PARQUET
from data.text.tars import TAR
from data.token_files.seal import sealed_store
from data.token_store.cached import cached_store
from data.token_store.store import Store

FORMATS = (
    TEXT,
    LINES,
    JSON,
    CSV,
    PARQUET,
    ARROW,
    TAR,
    TFRECORD,
    ARRAY_RECORD,
)


def formats_of(config: object) -> tuple[Format, ...]:
    """Return the formats that a section may name, with those that users have added."""
    own = getattr(type(config), "own", {}).get("format", {})
    return (*FORMATS, *own.values())


def text_store(config: DataConfig, beat: Callable[[], object] = lambda: None) -> Store:
    """Open the store of a config that reads text or token files; make it on first use.

    `beat` and the errors are those of `cached_store` and `sealed_store`.
    """
    if config.source in TOKEN_FILES:
        return sealed_store(config, beat)
    return cached_store(config, formats_of(config), beat)
