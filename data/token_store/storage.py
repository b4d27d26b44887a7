"""A folder of a token store: on a local disk, or under gs://, s3://, http:// ...

TensorStore reads and writes them all, and writes a key whole or not at all. Google's
and Amazon's credentials come from where their own tools look for them; another server
that speaks S3 is named by AWS_ENDPOINT_URL, as for Amazon's tools.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
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
    """Keys and bytes under one path or URL.

    What cannot be read or written, or not in `timeout_s`, raises a DataError.
    """

    def __init__(self, location: str | Path, context: ts.Context | None = None):
        """Name the folder; nothing is read.

        Raises:
            DataError: the URL is of a kind that TensorStore does not read.
        """
        self.path = None  # of a folder on a local disk
        if not is_remote(location):
            # A relative path would mean another folder after a change of directory.
            location = self.path = Path(location).expanduser().absolute()
        elif urlsplit(str(location)).scheme not in _REMOTE:
            kinds = ", ".join(f"{kind}://" for kind in _REMOTE)
            raise DataError(
                f"{location}: is no local path, nor one of {kinds}. Name one of these"
            )
        self.location = str(location).rstrip("/")
        self._context = context
        self._store: ts.KvStore | None = None

    def __str__(self) -> str:
        return self.location

    def spec(self, name: str = "") -> dict[str, Any]:
        """Return TensorStore's key-value spec of a folder in here."""
        folder = "/".join(part for part in (self.location, name) if part) + "/"
        if self.path is not None:
            return {"driver": "file", "path": folder}
        url = urlsplit(folder)
        if url.scheme in ("http", "https"):
            return {"driver": "http", "base_url": folder}
        if url.scheme == "memory":
            return {"driver": "memory", "path": url.netloc + url.path}
        driver = "gcs" if url.scheme == "gs" else "s3"
        spec: dict[str, Any] = {
            "driver": driver,
            "bucket": url.netloc,
            "path": url.path[1:],
        }
        if driver == "gcs":
            return spec
        # Source: tensorstore 0.1.80, kvstore/s3 schema. A URL has no place for these.
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            region = os.environ.get("AWS_REGION", "us-east-1")
            spec |= {"endpoint": endpoint, "aws_region": region}
        if "AWS_ACCESS_KEY_ID" in os.environ:
            # Looked at first in any case, but then with lines on stderr about all the
            # other places that hold nothing.
            spec["aws_credentials"] = {"type": "environment"}
        return spec

    def read(self, name: str) -> bytes:
        """Read a key; a FileNotFoundError says that there is none."""
        value, _ = self.read_version(name)
        if value is None:
            raise FileNotFoundError(f"{self}/{name}")
        return value

    def read_version(
        self, name: str, timeout_s: float | None = None
    ) -> tuple[bytes | None, bytes]:
        """Read a key, None if there is none, and the name of its version."""
        entry = self._call("read", name, lambda keys: keys.read(name), timeout_s)
        value = bytes(entry.value) if entry.state == "value" else None
        return value, entry.stamp.generation

    def write(self, name: str, value: bytes | None) -> None:
        """Write a key whole; None removes it, if there is one."""
        verb = "removed" if value is None else "written"
        self._call(verb, name, lambda keys: keys.write(name, value))

    def replace(
        self, name: str, value: bytes | None, version: bytes, timeout_s: float
    ) -> bytes | None:
        """Write a key, or remove it, if it is still of the version that was read.

        A request that was repeated may find its own first attempt in the way, and one
        that failed may have been carried out: read again to know.

        Returns:
            The new version; None if the key was of another one and was left alone.
        """

        def write(keys: ts.KvStore) -> ts.Future:
            return keys.write(name, value, if_equal=version)

        return self._call("written", name, write, timeout_s).generation or None

    def has(self, name: str) -> bool:
        """Return whether there is such a key."""
        return self.read_version(name)[0] is not None

    def names(self) -> list[str]:
        """List every key in here."""
        keys = self._call("listed", "", lambda keys: keys.list())
        return [key.decode() for key in keys]

    def _call(
        self,
        verb: str,
        name: str,
        request: Callable[[ts.KvStore], ts.Future],
        timeout_s: float | None = None,
    ) -> Any:
        """Make a request of the opened store, and wait for its result."""
        try:
            if self._store is None:  # opening may ask for credentials and regions
                opening = ts.KvStore.open(self.spec(), context=self._context)
                self._store = opening.result(timeout_s)
            return request(self._store).result(timeout_s)
        except (ValueError, OSError) as error:
            raise DataError(
                f"{self}/{name}: cannot be {verb} ({_reason(error)}). Check path, "
                f"network and permissions"
            ) from error


def _reason(error: Exception) -> str:
    """Return in words why TensorStore failed: of a local file, what the system says."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if code := re.search(r"\[os_error_code='(\d+)'\]", str(error)):
        return os.strerror(int(code[1]))
    # TensorStore separates keys by zeros, some of which it has escaped.
    return str(error).replace("\0", "/").replace("\\x00", "/")
