"""A local or remote folder as a key-value store with conditional writes.

epath and fsspec cannot make a write conditional on an unchanged file, and TensorStore
opens arrays by specs, not paths. This module provides conditional writes and specs;
data/storage.py provides all other access to files.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from data.errors import DataError
from data.storage import (
    ANSWER_S,
    FIRST_ANSWER_S,
    StorageError,
    check_regular,
    is_remote,
    local_path,
)

# The waits between attempts begin at one second and double: half a minute in all. The
# default of TensorStore, 32 attempts, takes a quarter of an hour.
HTTP_RETRIES = 5
_SCHEMES = ("gs", "s3", "http", "https", "memory")


class KeyValueStore:
    """A folder as a store of bytes by key, implemented with TensorStore.

    Methods that read, write or list raise StorageError if this fails, or if the store
    does not answer within `timeout_s`. With `timeout_s=None`, a remote store must
    answer its first request within `FIRST_ANSWER_S`, and later ones may take any time.
    """

    def __init__(self, location: str | Path, context: ts.Context | None = None):
        """Set the location; raise DataError if its URL scheme is not supported."""
        self.path = None  # stays None for a remote folder
        if not is_remote(location):
            # The meaning of a relative path would change with the working directory.
            location = self.path = local_path(location)
        elif urlsplit(str(location)).scheme not in _SCHEMES:
            schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise DataError(f"{location}: must be a local path or one under {schemes}")
        self.location = str(location).rstrip("/")
        self._context = context
        self._store: ts.KvStore | None = None
        self._has_answered = False

    def __str__(self) -> str:
        return self.location

    def spec(self, name: str = "") -> dict[str, Any]:
        """Return TensorStore's key-value spec of this folder, or of a folder in it."""
        folder = "/".join(part for part in (self.location, name) if part) + "/"
        if self.path is not None:
            return {"driver": "file", "path": folder}
        url = urlsplit(folder)
        if url.scheme in ("http", "https"):
            return {"driver": "http", "base_url": folder}
        if url.scheme == "memory":
            return {"driver": "memory", "path": url.netloc + url.path}
        spec: dict[str, Any] = {"bucket": url.netloc, "path": url.path[1:]}
        if url.scheme == "gs":
            return spec | {"driver": "gcs"}
        spec["driver"] = "s3"
        # A URL cannot hold endpoint, region and credentials.
        # Source: tensorstore 0.1.80, kvstore/s3 schema.
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            region = os.environ.get("AWS_REGION", "us-east-1")
            spec |= {"endpoint": endpoint, "aws_region": region}
        if "AWS_ACCESS_KEY_ID" in os.environ:
            # TensorStore tries the environment first in any case. Naming it here avoids
            # log messages about the other places, which hold no credentials.
            spec["aws_credentials"] = {"type": "environment"}
        return spec

    def read(self, name: str) -> bytes:
        """Read a key, or raise FileNotFoundError if it does not exist."""
        value, _ = self.read_version(name)
        if value is None:
            raise FileNotFoundError(f"{self}/{name}")
        return value

    def read_version(
        self, name: str, timeout_s: float | None = None
    ) -> tuple[bytes | None, bytes]:
        """Return the value and version of a key; a missing key has the value None."""
        if self.path is not None:
            try:
                check_regular(self.path / name)
            except (FileNotFoundError, NotADirectoryError):
                pass  # TensorStore says in which state the key is
            except OSError as error:
                raise StorageError(f"{self}/{name}", error, "read") from None
        entry = self._call("read", name, lambda store: store.read(name), timeout_s)
        value = bytes(entry.value) if entry.state == "value" else None
        return value, entry.stamp.generation

    def write(self, name: str, value: bytes | None) -> None:
        """Write a key atomically; the value None removes the key if it exists."""
        action = "removed" if value is None else "written"
        self._call(action, name, lambda store: store.write(name, value))

    def replace(
        self, name: str, value: bytes | None, version: bytes, timeout_s: float
    ) -> bytes | None:
        """Write or remove a key if it still has the `version` that was read.

        Returns the new version, or None if the key has another version and is left
        unchanged. None does not prove that another process wrote: if TensorStore sends
        a request twice, the second may be refused because the first succeeded. A
        request that raises may also have succeeded. Read the key again to find out.
        """

        def write(store: ts.KvStore) -> ts.Future:
            return store.write(name, value, if_equal=version)

        return self._call("written", name, write, timeout_s).generation or None

    def has(self, name: str) -> bool:
        """Return whether a key exists."""
        return self.read_version(name)[0] is not None

    def names(self) -> list[str]:
        """List every key."""
        return [key.decode() for key in self._call("listed", "", ts.KvStore.list)]

    def _call(
        self,
        action: str,
        name: str,
        request: Callable[[ts.KvStore], ts.Future],
        timeout_s: float | None = None,
    ) -> Any:
        """Open the store if necessary, send a request, and return the answer."""
        if timeout_s is None and self.path is None and not self._has_answered:
            timeout_s = FIRST_ANSWER_S
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def remaining_s() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        try:
            if self._store is None:  # opening may request credentials and the region
                spec = self.spec()
                if spec["driver"] == "http":
                    spec["http_request_retries"] = {"max_retries": HTTP_RETRIES}
                opening = ts.KvStore.open(spec, context=self._context)
                self._store = opening.result(remaining_s())
            answer = request(self._store).result(remaining_s())
            self._has_answered = True
            return answer
        except (ValueError, OSError) as error:
            raise StorageError(f"{self}/{name}", error, action) from error


def check_answers(folder: str) -> None:
    """Check that a remote folder answers, because fsspec would wait for minutes.

    Raises StorageError if access is refused, or no answer comes within `ANSWER_S`.
    """
    if is_remote(folder):
        KeyValueStore(folder).read_version("lease.json", ANSWER_S)
