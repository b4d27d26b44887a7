"""A folder of a token store: on a local disk, or under gs://, s3://, http:// ...

TensorStore reads and writes them all, and writes a key whole or not at all. Google's
and Amazon's credentials come from where their own tools look for them; another server
that speaks S3 is named by AWS_ENDPOINT_URL, as for Amazon's tools.
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from data.errors import DataError

_REMOTE = ("gs", "s3", "http", "https", "memory")


class Storage:
    """Keys and bytes under one path or URL."""

    def __init__(self, location: str | Path, context: ts.Context | None = None):
        """Name the folder; nothing is read.

        Raises:
            DataError: the URL is of a kind that TensorStore does not read.
        """
        scheme, separator, _ = str(location).partition("://")
        if separator and scheme not in _REMOTE:
            kinds = ", ".join(f"{kind}://" for kind in _REMOTE)
            raise DataError(
                f"{location}: is no local path, nor one of {kinds}. Name one of these"
            )
        # A relative path would mean another folder after a change of directory.
        local = not separator
        self.location = str(
            Path(location).expanduser().absolute() if local else location
        ).rstrip("/")
        self.path = Path(self.location) if local else None
        self._context = context
        self._store: ts.KvStore | None = None

    def __str__(self) -> str:
        """Give the path or URL."""
        return self.location

    def spec(self, name: str = "") -> dict[str, Any]:
        """Give TensorStore's key-value spec of a folder in here."""
        folder = "/".join(part for part in (self.location, name) if part) + "/"
        if self.path is not None:
            return {"driver": "file", "path": folder}
        url = urlsplit(folder)
        if url.scheme == "s3":
            # Source: tensorstore 0.1.80, kvstore/s3 schema. A URL has no place for it.
            where = {"bucket": url.netloc, "path": url.path[1:]}
            spec: dict[str, Any] = {"driver": "s3", **where}
            if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
                region = os.environ.get("AWS_REGION", "us-east-1")
                spec |= {"endpoint": endpoint, "aws_region": region}
            if "AWS_ACCESS_KEY_ID" in os.environ:
                # Looked at first in any case, but then with lines on stderr about all
                # the other places that hold nothing.
                spec["aws_credentials"] = {"type": "environment"}
            return spec
        if url.scheme == "gs":
            return {"driver": "gcs", "bucket": url.netloc, "path": url.path[1:]}
        if url.scheme == "memory":
            return {"driver": "memory", "path": url.netloc + url.path}
        return {"driver": "http", "base_url": folder}

    def read(self, name: str) -> bytes:
        """Read a key.

        Raises:
            FileNotFoundError: there is none.
            DataError: it cannot be read.
        """
        try:
            found = self._open().read(name).result()
        except (ValueError, OSError) as error:
            raise self._failed(name, "read", error) from error
        if found.state != "value":
            raise FileNotFoundError(f"{self}/{name}")
        return bytes(found.value)

    def write(self, name: str, value: bytes) -> None:
        """Write a key whole.

        Raises:
            DataError: it cannot be written.
        """
        try:
            self._open().write(name, value).result()
        except (ValueError, OSError) as error:
            raise self._failed(name, "written", error) from error

    def read_version(self, name: str, timeout_s: float) -> tuple[bytes | None, bytes]:
        """Read a key, None if there is none, and what its version is called.

        Raises:
            DataError: it cannot be read, or not in that time.
        """
        try:
            found = self._open(timeout_s).read(name).result(timeout_s)
        except (ValueError, OSError) as error:
            raise self._failed(name, "read", error) from error
        value = bytes(found.value) if found.state == "value" else None
        return value, found.stamp.generation

    def replace(
        self, name: str, value: bytes | None, version: bytes, timeout_s: float
    ) -> bytes | None:
        """Write a key, or remove it, if it is still of the version that was read.

        A request that was repeated may find its own first attempt in the way, and one
        that failed may have been carried out: read again to know.

        Returns:
            The new version; None if the key was of another one and was left alone.

        Raises:
            DataError: it cannot be written, or not in that time.
        """
        try:
            writing = self._open(timeout_s).write(name, value, if_equal=version)
            return writing.result(timeout_s).generation or None
        except (ValueError, OSError) as error:
            raise self._failed(name, "written", error) from error

    def has(self, name: str) -> bool:
        """Say whether there is such a key."""
        try:
            self.read(name)
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """List every key in here."""
        try:
            return [key.decode() for key in self._open().list().result()]
        except (ValueError, OSError) as error:
            raise self._failed("", "listed", error) from error

    def remove(self, name: str) -> None:
        """Remove a key, if there is one."""
        try:
            self._open().write(name, None).result()
        except (ValueError, OSError) as error:
            raise self._failed(name, "removed", error) from error

    def clear(self) -> None:
        """Remove every key in here."""
        try:
            self._open().delete_range(ts.KvStore.KeyRange()).result()
        except (ValueError, OSError) as error:
            raise self._failed("", "removed", error) from error

    def _open(self, timeout_s: float | None = None) -> ts.KvStore:
        if self._store is None:  # opening may ask for credentials and regions
            opening = ts.KvStore.open(self.spec(), context=self._context)
            self._store = opening.result(timeout_s)
        return self._store

    def _failed(self, name: str, verb: str, error: Exception) -> DataError:
        late = isinstance(error, TimeoutError)
        # TensorStore separates keys by zeros.
        reason = "no answer in time" if late else str(error).replace("\0", "/")
        return DataError(
            f"{self}/{name}: cannot be {verb} ({reason}). Check path, network and "
            f"permissions"
        )
