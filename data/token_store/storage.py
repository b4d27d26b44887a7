"""A folder of a token store: on a local disk, or under gs://, s3://, http:// ...

TensorStore reads and writes them all, and writes a key whole or not at all. Google's
and Amazon's credentials come from where their own tools look for them; another server
that speaks S3 is named by AWS_ENDPOINT_URL, as for Amazon's tools.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from data.errors import DataError
from data.machine import is_remote

_REMOTE = ("gs", "s3", "http", "https", "memory")


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a place beside `path`; the file or folder made there becomes `path`.

    It appears whole or not at all, a file also after a power failure. A file replaces
    what was there; a folder leaves one that another process was faster to put there.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    building = path.with_name(f"{path.name}.building-{secrets.token_hex(4)}")
    try:
        yield building
        if building.is_file():
            with building.open("rb") as file:
                os.fsync(file.fileno())
            building.replace(path)
            return
        try:
            building.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
        with contextlib.suppress(OSError):
            building.unlink(missing_ok=True)


class Storage:
    """Keys and bytes under one path or URL."""

    def __init__(self, location: str | Path, context: ts.Context | None = None):
        """Name the folder; nothing is read.

        Raises:
            DataError: the URL is of a kind that TensorStore does not read.
        """
        local = not is_remote(str(location))
        if not local and urlsplit(str(location)).scheme not in _REMOTE:
            kinds = ", ".join(f"{kind}://" for kind in _REMOTE)
            raise DataError(
                f"{location}: is no local path, nor one of {kinds}. Name one of these"
            )
        # A relative path would mean another folder after a change of directory.
        self.location = str(
            Path(location).expanduser().absolute() if local else location
        ).rstrip("/")
        self.path = Path(self.location) if local else None
        self._context = context
        self._store: ts.KvStore | None = None

    def __str__(self) -> str:
        """Return the path or URL."""
        return self.location

    def spec(self, name: str = "") -> dict[str, Any]:
        """Return TensorStore's key-value spec of a folder in here."""
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
            entry = self._open().read(name).result()
        except (ValueError, OSError) as error:
            raise self._failed(name, "read", error) from error
        if entry.state != "value":
            raise FileNotFoundError(f"{self}/{name}")
        return bytes(entry.value)

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
            entry = self._open(timeout_s).read(name).result(timeout_s)
        except (ValueError, OSError) as error:
            raise self._failed(name, "read", error) from error
        value = bytes(entry.value) if entry.state == "value" else None
        return value, entry.stamp.generation

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
        """Tell whether there is such a key."""
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
