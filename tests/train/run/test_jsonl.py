"""Lines survive kills and full disks. For stores, see test_jsonl_store.py."""

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY
from tests.program import program_code
from tests.train.run.lines import numbers, warnings
from train.run import jsonl, jsonl_reader
from train.run.jsonl import open_lines
from train.run.jsonl_reader import iterate_rows, newest_rows


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program_code(textwrap.dedent(code)), str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("torn", [b'{"n": 3, "lo', b'{"n": 3', b"\0\0\0", b"3"])
def test_a_torn_last_line_is_skipped_then_dropped(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n' + torn)
    assert numbers(tmp_path) == [1, 2]
    log = open_lines(tmp_path, "log")
    log.append({"n": 3})
    for _ in range(2):
        log.close()
        log.append({"n": 4})  # it is ignored after the close
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'


def test_damaged_lines_are_dropped_by_a_rewrite_that_survives_a_kill(
    tmp_path, monkeypatch
):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content := b'{"n": 1}\n\0\0\n{"n": 2}\n')

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            open_lines(tmp_path, "log")
    assert path.read_bytes() == content
    open_lines(tmp_path, "log").close()
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'


def test_written_lines_survive_a_kill(tmp_path):
    run(
        """
        import os, sys
        from train.run.jsonl import open_lines
        open_lines(sys.argv[1], "log").append({"n": 1})
        assert "jax" not in sys.modules
        os.kill(os.getpid(), 9)
        """,
        tmp_path,
    )
    assert numbers(tmp_path) == [1]


def test_values_are_json_and_nonfinite_ones_are_null(tmp_path):
    class Scalar:  # NumPy and JAX have such scalars
        def item(self):
            return 0.5

    log = open_lines(tmp_path, "log")
    log.append({"n": 7, "a": float("nan"), "b": float("inf"), "c": Scalar()})
    assert (tmp_path / "log.jsonl").read_text() == (
        '{"n": 7, "a": null, "b": null, "c": 0.5}\n'
    )


def test_threads_do_not_tear_each_others_lines(tmp_path):
    log = open_lines(tmp_path, "log")

    def work() -> None:
        for n in range(200):
            log.append({"n": n, "text": "x" * 500})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = (tmp_path / "log.jsonl").read_text()
    assert len([json.loads(line) for line in text.splitlines()]) == 800


def test_a_start_on_a_full_disk_can_drop_lines_after_its_step(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(9)))
    monkeypatch.delattr(jsonl, "write_atomically")  # there is no room for a copy
    open_lines(tmp_path, "log", lambda row: row["n"] < 4).close()
    assert numbers(tmp_path) == list(range(4))


@pytest.mark.parametrize("seed", range(12))
def test_on_a_broken_disk_lines_stay_whole_in_order_and_unique(
    tmp_path, monkeypatch, seed
):
    """Writes are cut short or refused, and syncs fail and lose what was written."""
    rng = random.Random(seed)
    broken = True
    write = os.write
    fsync = os.fsync
    path = tmp_path / "log.jsonl"
    synced = b""

    def bad_write(fd: int, data: bytes) -> int:
        if broken and rng.random() < 0.3:
            if rng.random() < 0.5:
                raise OSError(errno.EROFS, "read-only")
            return write(fd, data[: rng.randrange(len(data))])
        return write(fd, data)

    def bad_fsync(fd: int) -> None:
        nonlocal synced
        if broken and rng.random() < 0.5:
            if rng.random() < 0.5:
                path.write_bytes(synced)  # the kernel dropped the rest
            raise OSError(errno.EIO, "lost")
        fsync(fd)
        synced = path.read_bytes()

    monkeypatch.setattr(os, "write", bad_write)
    monkeypatch.setattr(os, "fsync", bad_fsync)
    log = open_lines(tmp_path, "log")
    for n in range(100):
        log.append({"n": n})
        if rng.random() < 0.1:
            try:
                log.flush()
                assert numbers(tmp_path) == list(range(n + 1))
            except OSError:
                pass
        content = path.read_bytes()
        assert content in (b"", content.rpartition(b"\n")[0] + b"\n")
        stored = numbers(tmp_path)
        assert stored == list(range(len(stored)))
    broken = False
    log.close()
    assert numbers(tmp_path) == list(range(100))


def test_memory_is_bounded_and_lost_lines_are_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(jsonl, "_MAX_LINES", 10)
    log = open_lines(tmp_path, "log")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: 0)
        for n in range(30):
            log.append({"n": n})
    log.append({"n": 30})
    log.append({"n": 31})
    for n in range(32, 60):  # written lines do not pile up either
        log.append({"n": n})
        assert len(log._lines) <= 11
    assert numbers(tmp_path) == [*range(10), *range(31, 60)]
    (warning,) = warnings(caplog)
    assert (
        "up to 10 lines wait in memory until it can, further ones are lost" in warning
    )
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    log.append({"n": 60})
    log.close()
    assert "log.jsonl lacks its last 1 lines" in warnings(caplog)[-1]


def test_a_run_copied_from_a_store_continues_on_disk(tmp_path):
    (tmp_path / "log").mkdir()
    for part in (1, 2, 10):
        (tmp_path / "log" / f"{part}.jsonl").write_text(f'{{"n": {part}}}\n')
    log = open_lines(tmp_path, "log", lambda row: row["n"] < 10)
    log.append({"n": 3})
    log.close()
    assert numbers(tmp_path) == [1, 2, 3]
    assert not (tmp_path / "log" / "10.jsonl").exists()


def test_the_file_with_damaged_lines_is_kept_and_they_are_counted(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content := b'{"n": 1}\n{"n\n\xff\n{"n": 2}\n{"n": 3}\n{"n": 4')
    for _ in range(2):
        open_lines(tmp_path, "log", lambda row: row["n"] < 3).close()
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'
    (damaged_copy,) = tmp_path.glob("log.jsonl.damaged-*")
    assert damaged_copy.read_bytes() == content
    (warning,) = warnings(caplog)  # only the first start warns
    assert "2 lines are damaged" in warning
    assert str(damaged_copy) in warning


def test_a_full_disk_keeps_damaged_lines_where_they_are(tmp_path, monkeypatch, caplog):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n\n{"n": 2}\n{"n": 3')

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl, "write_atomically", full)
    log = open_lines(tmp_path, "log")
    log.append({"n": 3})
    log.close()
    assert numbers(tmp_path) == [1, 2, 3]
    assert "1 lines are damaged. They stay where they are" in warnings(caplog)[0]
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("block", [1, 2, 7, 20, 1000])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b'\n{"n": 3'])
def test_a_log_is_read_from_its_end_in_pieces(tmp_path, monkeypatch, block, end):
    monkeypatch.setattr(jsonl_reader, "_BLOCK", block)
    lines = [b'{"n": %d, "text": "%s"}' % (n, b"x" * n) for n in range(20)]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines) + end)
    assert numbers(tmp_path) == list(range(20))


def test_a_large_log_is_opened_and_read_with_little_memory(tmp_path):
    line = b'{"n": 1, "text": "%s"}\n' % (b"x" * 1000)
    size = (tmp_path / "log.jsonl").write_bytes(line * 20_000)
    tracemalloc.start()
    try:
        open_lines(tmp_path, "log").close()
        assert next(newest_rows(tmp_path, "log"))["n"] == 1
        assert sum(row["n"] for row in iterate_rows(tmp_path, "log")) == 20_000
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
