"""One owner of a run directory: who it is stands in `lease.json`, and that it lives.

The owner rewrites the file every few seconds with the next count. Every write names the
version that it replaces, and the store refuses it if another came between: of several
that take a lease at once one gets it, and an owner that was stopped for so long that
another took its place learns of it and leaves the new lease alone. Local disks, gs://
and s3:// all write like this. A server that speaks S3, but not its conditional writes,
may let two starts in, until the next beat of one of them.

A dead owner's lease is taken over. On its own machine its process tells at once. From
elsewhere its count is watched: clocks of different machines are never compared.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import tensorstore as ts

from data.key_value_store import KeyValueStore
from data.storage import ANSWER_S, StorageError
from train.errors import OWNED, Exit
from train.run.folder import access_error
from train.run.liveness import Owner

log = logging.getLogger(__name__)

_KEY = "lease.json"
# No beat waits behind a checkpoint's many requests, and none need outlive a power cut.
_OWN = {"limit": 4}
_CONTEXT = ts.Context(
    {
        "file_io_sync": False,
        "file_io_concurrency": _OWN,
        "s3_request_concurrency": _OWN,
        "gcs_request_concurrency": _OWN,
    }
)


class Lease:
    """A run directory is this process', as long as nobody else has taken it."""

    def __init__(
        self,
        storage: KeyValueStore,
        owner: Owner,
        version: bytes,
        interval_s: float,
        timeout_s: float,
        on_lost: Callable[[str], None],
    ):
        """Begin to beat; the lease is taken already."""
        self._storage, self._owner, self._version = storage, owner, version
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._on_lost = on_lost
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._beaten_at = time.monotonic()
        self._failing = False
        self._lost: str | None = None
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """Make sure, before a save, that the run is still ours.

        Raises:
            Exit: OWNED, if another process has taken it.
        """
        if time.monotonic() - self._beaten_at > self._timeout_s / 2:
            self._beat()
        if self._lost:
            raise Exit(OWNED, self._lost)

    def close(self) -> None:
        """Remove the lease, so that the next start need not wait."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            try:
                self._replace(None)
            except (StorageError, Exit) as error:
                log.warning("the lease could not be removed: %s", error)

    def _keep(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._beat()

    def _beat(self) -> None:
        """Renew the lease; find out whether this process still owns the run."""
        began = time.monotonic()
        with self._lock:
            if self._ended.is_set():
                return
            owner = dataclasses.replace(self._owner, beat=self._owner.beat + 1)
            try:
                self._replace(owner)
            except StorageError as error:
                if not self._failing:
                    log.warning("%s; the lease is tried again, training goes on", error)
                self._failing = True
                return
            except Exit as lost:
                self._lost = str(lost)
                self._ended.set()
            else:
                if self._failing:
                    log.info("%s/%s is written again", self._storage, _KEY)
                self._owner, self._beaten_at, self._failing = owner, began, False
        if self._lost:
            self._on_lost(self._lost)

    def _replace(self, owner: Owner | None) -> None:
        """Write or remove the lease if it is ours.

        Raises:
            Exit: OWNED, if it is not.
            StorageError: if the store does not say.
        """
        content = None if owner is None else owner.to_json()
        while True:
            new = self._storage.replace(_KEY, content, self._version, ANSWER_S)
            if new is not None:
                self._version = new
                return
            owner, version = _read(self._storage)
            if owner is None or owner.token != self._owner.token:
                by = f"taken over by {owner}" if owner else "removed"
                raise Exit(
                    OWNED,
                    f"{self._storage}: the lease of this process was {by}, after it "
                    f"was silent for too long. It ends here and saves no more",
                )
            self._version = version  # of a write that seemed to fail


def take_lease(
    folder: str,
    interval_s: float,
    timeout_s: float,
    on_lost: Callable[[str], None],
) -> Lease:
    """Become the owner of a run directory.

    Args:
        folder: a local path, gs:// or s3://; made if missing.
        interval_s: between two signs of life.
        timeout_s: an owner on another machine that gave none for so long is dead.
        on_lost: called once, with the reason and from another thread, if another
            process takes the run, because this one was stopped or cut off for too long.

    Raises:
        Exit: OWNED, if a live process owns it; 1, if the store does not answer.
        ConfigError: the folder cannot be read or written, and no other start could.
    """
    storage, me = KeyValueStore(folder, _CONTEXT), Owner.current()
    try:
        version = _take(storage, me, interval_s, timeout_s)
    except StorageError as error:
        raise access_error(folder, error) from error
    return Lease(storage, me, version, interval_s, timeout_s, on_lost)


def read_owner(folder: str) -> Owner | None:
    """Return the owner of a run directory, dead or alive; None if there is none.

    Raises:
        StorageError: if the store cannot be read.
    """
    return _read(KeyValueStore(folder, _CONTEXT))[0]


def _take(
    storage: KeyValueStore, me: Owner, interval_s: float, timeout_s: float
) -> bytes:
    """Write the lease once nobody alive has it; give its version."""
    watched, since, silent = None, 0.0, f"gave no sign of life for {timeout_s:g} s"
    while True:
        owner, version = _read(storage)
        why = "is dead"
        if owner is not None:
            if owner.token == me.token:
                return version  # of a write that seemed to fail
            alive = owner.alive()
            if alive is None:
                if watched is None:
                    watched, since = version, time.monotonic()
                    log.info(
                        "%s: waiting up to %g s for a sign of life of its owner, %s",
                        *(storage, timeout_s, owner),
                    )
                alive, why = version != watched, silent
                if not alive and time.monotonic() - since < timeout_s:
                    time.sleep(interval_s / 4)
                    continue
            if alive:
                raise Exit(
                    OWNED,
                    f"{storage}: the run is owned by {owner}, which is alive. Wait for "
                    f"its end, stop it, or start another run.name",
                )
        taken = storage.replace(_KEY, me.to_json(), version, ANSWER_S)
        if taken is not None:
            if owner is not None:
                log.warning("%s: taken over from %s, which %s", storage, owner, why)
            return taken


def _read(storage: KeyValueStore) -> tuple[Owner | None, bytes]:
    content, version = storage.read_version(_KEY, ANSWER_S)
    return None if content is None else Owner.from_json(content), version
