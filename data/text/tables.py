"""Read rows of parquet and arrow files, one record batch at a time."""

from collections.abc import Callable, Iterator
from typing import Any

from data.config import FormatName
from data.text.files import File, Format, Unit, missing_package_error
from data.text.records import BadRecord, ReadSettings, Records, make_document
from data.text.streams import Stream

# Returns the names of the columns and the batches of an opened file, given the names
# of the columns that are read.
_Open = Callable[[Any, list[str]], tuple[list[str], Iterator[Any]]]


def read_parquet(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the documents of a parquet file."""
    return _read_table(unit, stream, settings, _open_parquet)


def read_arrow(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the documents of an arrow file or stream."""
    return _read_table(unit, stream, settings, _open_arrow)


def _read_table(
    unit: Unit, stream: Stream, settings: ReadSettings, open_table: _Open
) -> Records:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing_package_error("pyarrow", error) from error
    columns = [name for name in (settings.text_field, settings.id_field) if name]
    row = 0
    try:
        names, batches = open_table(stream.file, columns)
        if missing := [name for name in columns if name not in names]:
            yield BadRecord(unit.file, "row 0", f"no column {missing[0]!r}")
            return
        for batch in batches:
            yield from _read_rows(unit.file, row, batch, settings)
            row += batch.num_rows
    # Damaged lengths, and names that are not UTF-8, raise errors other than pyarrow's.
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as e:
        reason = str(e) or type(e).__name__
        yield BadRecord(unit.file, f"row {row}", f"cannot be read further: {reason}")


def _open_parquet(file: Any, columns: list[str]) -> tuple[list[str], Iterator[Any]]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
    # Read few rows at a time, because each may be as long as max_record_bytes.
    batches = table.iter_batches(batch_size=32, columns=columns)
    return table.schema_arrow.names, batches


def _open_arrow(file: Any, columns: list[str]) -> tuple[list[str], Iterator[Any]]:
    import pyarrow as pa

    if file.peek(6)[:6] != b"ARROW1":
        stream = pa.ipc.open_stream(file)
        return stream.schema.names, iter(stream)
    table = pa.ipc.open_file(file)
    return table.schema.names, map(table.get_batch, range(table.num_record_batches))


def _read_rows(
    file: File, first_row: int, batch: Any, settings: ReadSettings
) -> Records:
    texts = _column(batch, settings.text_field)
    ids = _column(batch, settings.id_field) if settings.id_field else None
    for index in range(batch.num_rows):
        location = f"row {first_row + index}"
        try:
            text = texts[index].as_py()
            record_id = None if ids is None else ids[index].as_py()
            if isinstance(record_id, bytes):
                record_id = record_id.decode()
        except UnicodeDecodeError:
            yield BadRecord(file, location, "not UTF-8")
        except (ValueError, OverflowError) as error:
            yield BadRecord(file, location, f"not a value of Python: {error}")
        else:
            yield make_document(file, location, text, record_id, settings)


def _column(batch: Any, name: str) -> Any:
    """Return a column, with text as bytes; raise pyarrow's error if it is malformed."""
    import pyarrow as pa

    column = batch.column(batch.schema.get_all_field_indices(name)[0])
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    column.validate(full=True)
    return column


def _begins_parquet(head: bytes) -> bool:
    return head.startswith(b"PAR1\x15")  # the first field of a header or of the footer


def _begins_arrow(head: bytes) -> bool:
    # A stream of arrow begins with -1 and the length of its schema, in 32 bits each.
    is_stream = head.startswith(b"\xff\xff\xff\xff") and head[7:8] == b"\0"
    return is_stream or head.startswith(b"ARROW1\0\0")


PARQUET = Format(
    name=FormatName.parquet,
    kind="parquet tables",
    read=read_parquet,
    description=".parquet",
    suffixes=(".parquet",),
    begins=_begins_parquet,
)
ARROW = Format(
    name=FormatName.arrow,
    kind="arrow tables",
    read=read_arrow,
    description=".arrow",
    suffixes=(".arrow",),
    begins=_begins_arrow,
)
