"""Rows of parquet and arrow files, a few at a time."""

from collections.abc import Iterator
from typing import Any

from data.text.files import File, Unit, missing
from data.text.records import Bad, Reading, Record, document
from data.text.streams import Stream

# What else pyarrow raises on damage: lengths of nonsense, names that are not UTF-8.
_DAMAGED = (OSError, ValueError, OverflowError, MemoryError)


def parquet(unit: Unit, stream: Stream, how: Reading) -> Iterator[Record | Bad]:
    """Yield the rows of a parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing("pyarrow", error) from error
    columns = [how.text_field, *([how.id_field] if how.id_field else [])]
    row = 0
    try:
        table = pq.ParquetFile(stream.file, buffer_size=2**20, pre_buffer=False)
        absent = [name for name in columns if name not in table.schema_arrow.names]
        if absent:
            yield Bad(unit.file, "row 0", f"no column {absent[0]!r}")
            return
        # Few rows at a time: each may be as long as max_record_bytes.
        for batch in table.iter_batches(batch_size=32, columns=columns):
            yield from _rows(unit.file, row, batch, how)
            row += batch.num_rows
    except (pa.ArrowException, *_DAMAGED) as error:
        reason = str(error) or type(error).__name__
        yield Bad(unit.file, f"row {row}", f"cannot be read further: {reason}")


def arrow(unit: Unit, stream: Stream, how: Reading) -> Iterator[Record | Bad]:
    """Yield the rows of an arrow file, of the stream or the file format."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing("pyarrow", error) from error
    row, raw = 0, stream.file
    try:
        is_file = stream.file.peek(6)[:6] == b"ARROW1"
        reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
        for field in (how.text_field, how.id_field):
            if field is not None and field not in reader.schema.names:
                yield Bad(unit.file, "row 0", f"no column {field!r}")
                return
        batches: Any = reader
        if is_file:
            count = reader.num_record_batches
            batches = (reader.get_batch(index) for index in range(count))
        for batch in batches:
            yield from _rows(unit.file, row, batch, how)
            row += batch.num_rows
    except (pa.ArrowException, *_DAMAGED) as error:
        reason = str(error) or type(error).__name__
        yield Bad(unit.file, f"row {row}", f"cannot be read further: {reason}")


def _rows(file: File, first: int, batch: Any, how: Reading) -> Iterator[Record | Bad]:
    texts = _column(batch, how.text_field)
    names = _column(batch, how.id_field) if how.id_field else None
    for index in range(batch.num_rows):
        place = f"row {first + index}"
        try:
            text = texts[index].as_py()
            name = None if names is None else names[index].as_py()
            name = name.decode() if isinstance(name, bytes) else name
        except UnicodeDecodeError:
            yield Bad(file, place, "not UTF-8")
        except (ValueError, OverflowError) as error:
            yield Bad(file, place, f"no value of Python's: {error}")
        else:
            yield document(file, place, text, name, how)


def _column(batch: Any, name: str) -> Any:
    """Return a column, text as bytes; damaged offsets would read foreign memory."""
    import pyarrow as pa

    column = batch.column(batch.schema.get_all_field_indices(name)[0])
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    column.validate(full=True)
    return column
