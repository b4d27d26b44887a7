"""Names from files must stay below their folder, and only files are opened."""

import os
import socket
from pathlib import Path

import pytest
from etils import epath

from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.names import checked_name, numbers_in
from data.storage import copy_file, file_below, write_atomically
from data.tokenizer import load_tokenizer
from data.tokenizer_folder import digest_of

BAD = (
    *("", ".", "..", "/etc/passwd", "../x", "a/../../x", "a/..", "./x", "a//b", "a/"),
    *("gs://bucket/x", "s3://x", "file:///etc/passwd", "..\\x", "a\\..\\b"),
    *("a\0b", "a\nb", "a\x1b[2J", "\ud800", None, 3, 1.5, True, [], ["a"], {"a": 1}),
)
GOOD = ("x", "a/b", "state/d/bc41169b9226479a", "...", "..x", "a b", "é", "_METADATA")


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_a_name_that_leads_elsewhere_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="is not the name of a file below its folder"):
        checked_name(name)
    with pytest.raises(ValueError, match="is not the name"):
        file_below(epath.Path(tmp_path), name)


@pytest.mark.parametrize("name", GOOD)
def test_a_plain_name_is_accepted(name, tmp_path):
    assert checked_name(name) == name
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    assert file_below(epath.Path(tmp_path), name) == epath.Path(tmp_path / name)


def test_only_plain_numbers_are_numbers():
    names = ["10", "2", "0", "007", "+1", "-1", "1.0", "²", "٣", "1_0", " 1", "", "x"]
    assert numbers_in(names) == [0, 2, 10]


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a socket's path has at most 108 characters


STRANGE = {
    "a pipe": os.mkfifo,
    "a device": make_device,
    "a socket": make_socket,
    "a folder": Path.mkdir,
    "a link to a pipe": lambda path: (
        os.mkfifo(path.with_name("pipe")),
        path.symlink_to("pipe"),
    ),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=[*STRANGE])
def test_nothing_but_a_file_is_opened(tmp_path, make, monkeypatch):
    """None of these functions hangs."""
    monkeypatch.chdir(tmp_path)
    folder = epath.Path(tmp_path)
    make(tmp_path / "tokenizer.json")
    with pytest.raises(OSError, match="is not a regular file"):
        file_below(folder, "tokenizer.json")
    with pytest.raises(OSError, match="is not a regular file"):
        copy_file(folder / "tokenizer.json", folder / "copy")
    with pytest.raises(DataError, match="is not a regular file"):
        KeyValueStore(tmp_path).read("tokenizer.json")
    with pytest.raises(DataError):
        load_tokenizer(str(tmp_path))
    assert digest_of(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["file", ".file.tmp"])
@pytest.mark.parametrize("write", ["write", "copy"])
def test_writing_follows_no_link_and_waits_for_no_pipe(tmp_path, name, write):
    (tmp_path / "new").write_text("new")

    def put(path: epath.Path) -> None:
        if write == "write":
            write_atomically(path, "new")
        else:
            copy_file(epath.Path(tmp_path / "new"), path)

    target = tmp_path / "other"
    path = tmp_path / "folder" / name
    path.parent.mkdir()
    target.write_text("precious")
    for make in (lambda: path.symlink_to(target), lambda: os.mkfifo(path), path.mkdir):
        make()
        if name == ".file.tmp" or write == "copy" or not path.is_dir():
            put(epath.Path(path.parent / "file"))
            assert (path.parent / "file").read_text() == "new"
        assert target.read_text() == "precious"
        for item in path.parent.iterdir():
            item.rmdir() if item.is_dir() and not item.is_symlink() else item.unlink()
