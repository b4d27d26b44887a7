"""Read TFRecord and ArrayRecord files: records of UTF-8 text, or `tf.train.Example`.

A record is an `Example` if it parses as one. Its features of bytes are the fields of
the record; a feature with several values has the first one.

Sources: tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details";
tensorflow/core/example/{example,feature}.proto at v2.20.
"""

import functools
import struct
from typing import Any

import google_crc32c

from data.config import FormatName
from data.errors import DataError
from data.storage import is_remote
from data.text.files import File, Format, Unit, missing_package_error
from data.text.records import (
    BadRecord,
    ReadSettings,
    Record,
    Records,
    document_of_fields,
    make_document,
    too_long_reason,
)
from data.text.streams import Stream

_LENGTH = struct.Struct("<QI")  # the length of a record, and its masked CRC-32C
_CHECKSUM = struct.Struct("<I")
_RECORDS_AT_ONCE = 64
_ARRAY_RECORD_MAGIC = bytes.fromhex("83af70d10d884a3f")
_SCHEMA = """
    name: "longhaul/example.proto"
    package: "longhaul"
    syntax: "proto3"
    message_type {
        name: "BytesList"
        field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED }
    }
    message_type {
        name: "Feature"
        field { name: "bytes_list" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL
                type_name: ".longhaul.BytesList" }
    }
    message_type {
        name: "Entry"
        field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
        field { name: "value" number: 2 type: TYPE_MESSAGE label: LABEL_OPTIONAL
                type_name: ".longhaul.Feature" }
    }
    message_type {
        name: "Features"
        field { name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
                type_name: ".longhaul.Entry" }
    }
    message_type {
        name: "Example"
        field { name: "features" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL
                type_name: ".longhaul.Features" }
    }
"""


def read_tfrecord(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the records of a TFRecord file."""
    number = 0
    while header := stream.take(_LENGTH.size):
        location = f"record {number}"
        content = b""
        if reason := _broken_header(header, settings.max_record_bytes):
            yield BadRecord(unit.file, location, f"cannot be read further: {reason}")
            return
        length, _ = _LENGTH.unpack(header)
        content = stream.take(length)
        checksum = stream.take(_CHECKSUM.size)
        if len(checksum) < _CHECKSUM.size:
            reason = stream.damage or "the file ends in the middle of a record"
            yield BadRecord(unit.file, location, f"cannot be read further: {reason}")
            return
        if _CHECKSUM.unpack(checksum)[0] != _masked_crc(content):
            yield BadRecord(unit.file, location, "its checksum is different")
        else:
            yield _document(unit.file, location, content, settings)
        number += 1
    if stream.damage is not None:
        reason = f"cannot be read further: {stream.damage}"
        yield BadRecord(unit.file, f"record {number}", reason)


def read_array_record(unit: Unit, stream: Stream, settings: ReadSettings) -> Records:
    """Yield the records of an ArrayRecord file on a local or mounted disk."""
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise missing_package_error("array_record", error) from error
    path = unit.file.path
    if is_remote(path):
        raise DataError(
            f"{path}: ArrayRecord files are read only from local and mounted disks. "
            f"Mount the bucket, or copy the file"
        )
    reader = ArrayRecordReader(path)
    total = reader.num_records()
    if not reader.ok():
        yield BadRecord(unit.file, "record 0", "no whole ArrayRecord file")
        return
    for start in range(0, total, _RECORDS_AT_ONCE):
        numbers = range(start, min(start + _RECORDS_AT_ONCE, total))
        try:
            contents = reader.read([*numbers])
        except (OSError, ValueError, RuntimeError, IndexError) as error:
            reason = f"cannot be read further: {error}"
            yield BadRecord(unit.file, f"record {start}", reason)
            return
        for number, content in zip(numbers, contents, strict=True):
            yield _document(unit.file, f"record {number}", content, settings)


def _document(
    file: File, location: str, content: bytes, settings: ReadSettings
) -> Record | BadRecord:
    """Make a document of a record."""
    fields = _fields_of(content, settings.id_field)
    if fields is None:
        return make_document(file, location, content, None, settings)
    return document_of_fields(file, location, fields, settings)


def example_fields(content: bytes) -> dict[str, bytes] | None:
    """Return the features of bytes of a `tf.train.Example`; None for other content."""
    from google.protobuf.message import DecodeError

    example = _example_type()()
    try:
        example.ParseFromString(content)
    except DecodeError:
        return None
    entries = example.features.feature
    if not entries:
        return None
    lists = ((entry.key, entry.value.bytes_list.value) for entry in entries)
    return {key: values[0] for key, values in lists if values}


def _fields_of(content: bytes, id_field: str | None) -> dict[str, Any] | None:
    """Return the fields of an `Example`, its id as text; None for other content."""
    fields: dict[str, Any] | None = example_fields(content)
    if fields is not None and id_field in fields:
        fields[id_field] = fields[id_field].decode(errors="replace")
    return fields


@functools.cache
def _example_type() -> Any:
    """Return the class of messages that `tf.train.Example` serializes."""
    from google.protobuf import descriptor_pool, message_factory, text_format
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, FileDescriptorProto()))
    descriptor = pool.FindMessageTypeByName("longhaul.Example")
    return message_factory.GetMessageClass(descriptor)


def _masked_crc(content: bytes) -> int:
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _broken_header(header: bytes, limit: int) -> str | None:
    """Return why the header of a record cannot be used, or None."""
    if len(header) < _LENGTH.size:
        return "the file ends in the middle of a record"
    length, crc = _LENGTH.unpack(header)
    if crc != _masked_crc(header[:8]):
        return "the checksum of its length is different"
    return too_long_reason(length, limit) if length > limit else None


def _begins_tfrecord(head: bytes) -> bool:
    return len(head) >= _LENGTH.size and not _broken_header(head[:12], 2**62)


def _begins_array_record(head: bytes) -> bool:
    return head.startswith(_ARRAY_RECORD_MAGIC)


TFRECORD = Format(
    name=FormatName.tfrecord,
    kind="TFRecord files",
    read=read_tfrecord,
    description=".tfrecord",
    suffixes=(".tfrecord", ".tfrecords"),
    begins=_begins_tfrecord,
    may_be_compressed=True,
)
ARRAY_RECORD = Format(
    name=FormatName.array_record,
    kind="ArrayRecord files",
    read=read_array_record,
    description=".array_record",
    suffixes=(".array_record", ".arrayrecord"),
    begins=_begins_array_record,
)
