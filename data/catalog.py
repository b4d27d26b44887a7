"""The formats of files that are read, and the encoding of text on first use.

Commands and the start of a run import this module, and hand its values to the code that
reads.
"""

from collections.abc import Callable

from data.config import DataConfig
from data.text.delimited import CSV
from data.text.files import Format
from data.text.json_formats import JSON, LINES
from data.text.plain_text import TEXT
from data.text.tables import ARROW, PARQUET
from data.token_store.cached import cached_store
from data.token_store.store import Store

FORMATS = (
    TEXT,
    LINES,
    JSON,
    CSV,
    PARQUET,
    ARROW,
)


def formats_of(config: object) -> tuple[Format, ...]:
    """Return the formats that a section may name, with those that users have added."""
    own = getattr(type(config), "own", {}).get("format", {})
    return (*FORMATS, *own.values())


def text_store(config: DataConfig, beat: Callable[[], object] = lambda: None) -> Store:
    """Open the store of a config that reads text; encode the text on first use.

    `beat` and the errors are those of `cached_store`.
    """
    return cached_store(config, formats_of(config), beat)
