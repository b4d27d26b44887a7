"""Read the documents of a unit of input, in bounded memory.

A record that cannot be used becomes a `BadRecord` with its location and the reason.
Good records before and after a bad one are still read.
"""

from collections.abc import Callable

from data.text.files import Unit
from data.text.records import ReadSettings, Records
from data.text.streams import open_stream


def read_documents(
    unit: Unit,
    settings: ReadSettings,
    progress: Callable[[int], object] = lambda _: None,
) -> Records:
    """Read the documents of a unit; call `progress` with the bytes of each read.

    Raises DataError if the file cannot be read, or an optional package is missing.
    """
    with open_stream(unit.file, progress) as stream:
        yield from unit.file.format.read(unit, stream, settings)
