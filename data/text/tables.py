"""Read rows of parquet and arrow files, one record batch at a time."""

from collections.abc import Callable, Iterator
from typing import Any

from data.config import FormatName
from data.text.files import File, Format, Unit, missing_package_error
from data.text.records import BadRecord, ReadSettings, Records, document_of_values
from data.text.streams import Stream

# Returns the schema and the batches of an opened file, given the columns that are read.
_Open = Callable[[Any, list[str]], tuple[Any, Iterator[Any]]]


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
    columns = [*settings.fields]
    row = 0
    try:
        schema, batches = open_table(stream.file, columns)
        if missing := [name for name in columns if not _has_column(schema, name)]:
            yield BadRecord(unit.file, "row 0", f"no column {missing[0]!r}")
            return
        for batch in batches:
            yield from _read_rows(unit.file, row, batch, settings)
            row += batch.num_rows
    # Damaged lengths, and names that are not UTF-8, raise errors other than pyarrow's.
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as e:
        reason = str(e) or type(e).__name__
        yield BadRecord(unit.file, f"row {row}", f"cannot be read further: {reason}")


def _open_parquet(file: Any, columns: list[str]) -> tuple[Any, Iterator[Any]]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
    # Read few rows at a time, because each may be as long as max_record_bytes.
    batches = table.iter_batches(batch_size=32, columns=columns)
    return table.schema_arrow, batches


def _open_arrow(file: Any, columns: list[str]) -> tuple[Any, Iterator[Any]]:
    import pyarrow as pa

    if file.peek(6)[:6] != b"ARROW1":
        stream = pa.ipc.open_stream(file)
        return stream.schema, iter(stream)
    table = pa.ipc.open_file(file)
    return table.schema, map(table.get_batch, range(table.num_record_batches))


def _read_rows(
    file: File, first_row: int, batch: Any, settings: ReadSettings
) -> Records:
    columns = [_column(batch, name) for name in settings.fields]
    for index in range(batch.num_rows):
        location = f"row {first_row + index}"
        try:
            values = [column[index].as_py() for column in columns]
            if settings.id_field and isinstance(values[-1], bytes):
                values[-1] = values[-1].decode()
        except UnicodeDecodeError:
            yield BadRecord(file, location, "not UTF-8")
        except (ValueError, OverflowError) as error:
            yield BadRecord(file, location, f"not a value of Python: {error}")
        else:
            yield document_of_values(file, location, values, settings)


def _has_column(schema: Any, name: str) -> bool:
    """Return whether a schema has a column, or a field of a column as in a.b."""
    import pyarrow as pa

    outer, *inner = name.split(".")
    if name in schema.names or outer not in schema.names:
        return name in schema.names
    dtype = schema.field(outer).type
    for part in inner:
        if not pa.types.is_struct(dtype) or dtype.get_field_index(part) < 0:
            return False
        dtype = dtype.field(part).type
    return True


def _column(batch: Any, name: str) -> Any:
    """Return a column, with text as bytes; raise pyarrow's error if it is malformed.

    a.b is the field b of the column a.
    """
    import pyarrow as pa
    import pyarrow.compute

    # Its functions are made at import, so the type checker does not know them.
    pc: Any = pyarrow.compute
    names = [name] if name in batch.schema.names else name.split(".")
    column = batch.column(batch.schema.get_all_field_indices(names[0])[0])
    if names[1:]:
        column = pc.struct_field(column, names[1:])
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
