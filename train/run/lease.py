"""A run directory has one owner, which keeps `lease.json` up to date.

The owner rewrites the file every few seconds with an increased count. Each write names
the version that it replaces, and the store refuses the write if the file has changed.
So only one of several starts gets the lease. If an owner was suspended until another
start took over, it notices this at its next write, and leaves the new lease alone.
Local disks, gs:// and s3:// support conditional writes. An S3 server without them may
admit two starts until one of them renews its lease.

A start takes over the lease of a dead owner. On the owner's machine, the process table
shows whether the owner lives. A start on another machine watches whether the file
changes; it does not compare times, because the clocks of machines may disagree.
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
from train.liveness import Owner
from train.run.folder import access_error

log = logging.getLogger(__name__)

_KEY = "lease.json"
# Renewals have a separate request queue, so that no checkpoint delays them. They are
# not synced to the disk, so a power failure may undo them. As it also ends the owner,
# the next start takes over the older or damaged lease.
_LIMIT = {"limit": 4}
_CONTEXT = ts.Context(
    {
        "file_io_sync": False,
        "file_io_concurrency": _LIMIT,
        "s3_request_concurrency": _LIMIT,
        "gcs_request_concurrency": _LIMIT,
    }
)


class Lease:
    """The claim of this process on a run directory."""

    def __init__(
        self,
        storage: KeyValueStore,
        owner: Owner,
        version: bytes,
        interval_s: float,
        timeout_s: float,
        on_lost: Callable[[str], None],
    ):
        """Start to renew a lease that this process has taken."""
        self._storage = storage
        self._owner = owner
        self._version = version
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._renewed_at = time.monotonic()
        self._failing = False
        self._lost_reason: str | None = None
        threading.Thread(target=self._renew_loop, name="lease", daemon=True).start()

    def check(self) -> None:
        """Check, before a save, that this process still owns the run.

        Raises:
            Exit: OWNED, if another process has taken the run.
        """
        if time.monotonic() - self._renewed_at > self._timeout_s / 2:
            self._renew()
        if self._lost_reason:
            raise Exit(OWNED, self._lost_reason)

    def close(self) -> None:
        """Remove the lease, so that the next start does not wait."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            try:
                self._replace(None)
            except (StorageError, Exit) as error:
                log.warning("the lease could not be removed: %s", error)

    def _renew_loop(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._renew()

    def _renew(self) -> None:
        """Renew the lease, or note that another process has taken the run."""
        began_at = time.monotonic()
        with self._lock:
            if self._ended.is_set():
                return
            owner = dataclasses.replace(self._owner, beat=self._owner.beat + 1)
            try:
                self._replace(owner)
            except StorageError as error:
                if not self._failing:
                    message = "%s; training continues, and the lease is tried again"
                    log.warning(message, error)
                self._failing = True
                return
            except Exit as error:
                self._lost_reason = str(error)
                self._ended.set()
            else:
                if self._failing:
                    log.info("%s/%s is written again", self._storage, _KEY)
                self._owner = owner
                self._renewed_at = began_at
                self._failing = False
        if self._lost_reason:
            self._on_lost(self._lost_reason)

    def _replace(self, owner: Owner | None) -> None:
        """Write or remove the lease if this process owns it.

        Raises:
            Exit: OWNED, if another process owns the lease.
            StorageError: the store does not answer.
        """
        content = None if owner is None else owner.to_json()
        while True:
            new_version = self._storage.replace(_KEY, content, self._version, ANSWER_S)
            if new_version is not None:
                self._version = new_version
                return
            owner, version = _read(self._storage)
            if owner is None or owner.token != self._owner.token:
                event = f"taken over by {owner}" if owner else "removed"
                message = f"{self._storage}: the lease of this process was {event}, "
                message += "after it was silent for too long. It ends and saves no more"
                raise Exit(OWNED, message)
            self._version = version  # our last write seemed to fail, but succeeded


def take_lease(
    folder: str, interval_s: float, timeout_s: float, on_lost: Callable[[str], None]
) -> Lease:
    """Take and return the lease of a run directory; the directory is made if missing.

    Args:
        folder: a local path, or a URL with gs:// or s3://.
        interval_s: the time between two renewals.
        timeout_s: an owner on another machine counts as dead after this time without
            renewal.
        on_lost: called once from another thread, with the reason, if another process
            takes the run because this one was stopped or cut off for too long.

    Raises:
        Exit: OWNED, if a live process owns the run; CRASHED, if the store does
            not answer.
        ConfigError: the folder cannot be accessed, and a retry would not help.
    """
    storage = KeyValueStore(folder, _CONTEXT)
    claimant = Owner.current()
    try:
        version = _take(storage, claimant, interval_s, timeout_s)
    except StorageError as error:
        raise access_error(folder, error) from error
    return Lease(storage, claimant, version, interval_s, timeout_s, on_lost)


def read_owner(folder: str) -> Owner | None:
    """Return the owner of a run directory, dead or alive; None if there is none.

    Raises:
        StorageError: the store cannot be read.
    """
    return _read(KeyValueStore(folder, _CONTEXT))[0]


def _take(
    storage: KeyValueStore, claimant: Owner, interval_s: float, timeout_s: float
) -> bytes:
    """Write the lease once no live process holds it; return its version."""
    watched_version = None
    watched_since_s = 0.0
    while True:
        owner, version = _read(storage)
        reason = "is dead"
        if owner is not None:
            if owner.token == claimant.token:
                return version  # our last write seemed to fail, but succeeded
            alive = owner.alive()
            if alive is None:
                if watched_version is None:
                    watched_version = version
                    watched_since_s = time.monotonic()
                    message = "%s: waiting up to %g s for a sign of life of %s"
                    log.info(message, storage, timeout_s, owner)
                reason = f"gave no sign of life for {timeout_s:g} s"
                alive = version != watched_version
                if not alive and time.monotonic() - watched_since_s < timeout_s:
                    time.sleep(interval_s / 4)
                    continue
            if alive:
                message = f"{storage}: the run is owned by {owner}, which is alive. "
                message += "Wait for its end, stop it, or start another run.name"
                raise Exit(OWNED, message)
        new_version = storage.replace(_KEY, claimant.to_json(), version, ANSWER_S)
        if new_version is not None:
            if owner is not None:
                log.warning("%s: taken over from %s, which %s", storage, owner, reason)
            return new_version


def _read(storage: KeyValueStore) -> tuple[Owner | None, bytes]:
    content, version = storage.read_version(_KEY, ANSWER_S)
    return None if content is None else Owner.from_json(content), version
