"""Lines in the objects of a store survive outages and kills."""

import os
import threading
from typing import Any

import fsspec
import pytest
from etils import epath
from etils.epath import backend

from tests.train.run.lines import numbers, warnings
from train.run import jsonl
from train.run.jsonl import open_lines


class Store:
    """A store in memory that replaces s3://, with its own clock and outages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        self.down = False
        self.writes = list[str]()
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
        self.objects = memory.store
        real_open = backend.fsspec_backend.open

        def open_object(path: Any, mode: str) -> Any:
            if "w" in mode:
                if self.down:
                    raise ConnectionError("no route to the store")
                self.writes.append(os.fspath(path).rpartition("/")[2])
            return real_open(path, mode)

        monkeypatch.setattr(backend._FileSystemSpecBackend, "fs", lambda *_: memory)
        monkeypatch.setattr(backend.fsspec_backend, "open", open_object)
        monkeypatch.setattr(jsonl.time, "monotonic", lambda: self.now)

    def names(self) -> list[str]:
        return sorted(name.removeprefix(f"{RUN}/") for name in self.objects)


RUN = "s3://bucket/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def settle(log: Any) -> None:
    """Wait for the upload in the background."""
    if log._upload:
        log._upload.exception()


def test_objects_are_uploaded_at_intervals_and_by_flush(store, caplog):
    log = open_lines(RUN, "log")
    log.append({"n": 1})
    settle(log)
    assert store.names() == []
    log.flush()
    log.flush()
    assert store.names() == ["log/1.jsonl"]
    assert store.writes == ["1.jsonl"]
    store.now = 30
    log.append({"n": 2})
    settle(log)
    assert numbers(RUN) == [1]
    store.now = 100
    log.append({"n": 3})
    settle(log)
    assert numbers(RUN) == [1, 2, 3]
    assert len(store.writes) == 2
    store.now = 200
    store.down = True
    for n in (4, 5, 6):
        log.append({"n": n})
        settle(log)
    with pytest.raises(OSError, match="no route to the store"):
        log.flush()
    (warning,) = warnings(caplog)
    assert f"{RUN}/log cannot be written: ConnectionError: no route" in warning
    assert numbers(RUN) == [1, 2, 3]
    store.now = 300
    store.down = False
    log.append({"n": 7})
    log.append({"n": 8})
    log.close()
    assert numbers(RUN) == list(range(1, 9))
    assert len(warnings(caplog)) == 1


def test_an_upload_does_not_block_appends(store, monkeypatch):
    release = threading.Event()
    real_open = backend.fsspec_backend.open

    def slow_open(path: Any, mode: str) -> Any:
        assert "w" not in mode or release.wait(30)
        return real_open(path, mode)

    monkeypatch.setattr(backend.fsspec_backend, "open", slow_open)
    log = open_lines(RUN, "log")
    for n in range(3):
        store.now += 100
        log.append({"n": n})
    assert not release.is_set()
    assert store.names() == []
    release.set()
    log.close()
    assert numbers(RUN) == [0, 1, 2]


def test_a_large_part_is_followed_by_a_new_part(store, monkeypatch):
    monkeypatch.setattr(jsonl, "_PART_BYTES", 40)
    log = open_lines(RUN, "log")
    for n in range(10):
        log.append({"n": n})
        log.flush()
    log.close()
    assert store.names() == ["log/1.jsonl", "log/2.jsonl"]
    assert numbers(RUN) == list(range(10))
    # The full part is not written again, not even by the next start.
    store.writes.clear()
    log = open_lines(RUN, "log")
    log.append({"n": 10})
    log.close()
    assert set(store.writes) <= {"2.jsonl", "3.jsonl"}
    assert numbers(RUN) == list(range(11))


@pytest.mark.parametrize("last", [-1, 0, 3, 4, 5, 11, 29])
@pytest.mark.parametrize("kills", range(5))
def test_a_kill_while_the_newest_lines_are_dropped_leaves_no_gap(
    store, monkeypatch, last, kills
):
    """A start is killed after `kills` changes, and the next start completes them."""
    monkeypatch.setattr(jsonl, "_PART_BYTES", 20)
    log = open_lines(RUN, "log")
    for n in range(30):
        log.append({"n": n})
        log.flush()
    log.close()
    left = kills
    unlink = type(epath.Path(RUN)).unlink
    write = jsonl.write_atomically

    def count_changes(change: Any) -> Any:
        def change_or_die(*args: Any) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            change(*args)

        return change_or_die

    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path(RUN)), "unlink", count_changes(unlink))
        patch.setattr(jsonl, "write_atomically", count_changes(write))
        try:
            open_lines(RUN, "log", lambda row: row["n"] <= last)
        except KeyboardInterrupt:
            assert numbers(RUN) == list(range(max(last + 1, len(numbers(RUN)))))
    log = open_lines(RUN, "log", lambda row: row["n"] <= last)
    assert numbers(RUN) == list(range(last + 1))
    log.append({"n": last + 1})
    log.close()
    assert numbers(RUN) == list(range(last + 2))


def test_a_part_that_is_damaged_as_a_whole_is_kept_under_another_name(store, caplog):
    memory = fsspec.filesystem("memory")
    memory.pipe(f"{RUN}/log/1.jsonl", b'{"n": 1}\n')
    memory.pipe(f"{RUN}/log/2.jsonl", b"\0\0\0\n\0\0\n")
    open_lines(RUN, "log").close()
    assert "log/2.jsonl.damaged-1" in store.names()
    (warning,) = warnings(caplog)
    assert "2 lines are damaged" in warning
    assert numbers(RUN) == [1]
