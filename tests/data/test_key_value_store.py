import fcntl
import socket
from collections.abc import Iterator

import fsspec
import pytest
import tensorstore as ts

from data import key_value_store
from data import storage as storage_module
from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.text.find import find_files
from data.token_store.store import open_store


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path) -> KeyValueStore:
    location = {"local": str(tmp_path), "memory": "memory://folder"}[request.param]
    return KeyValueStore(location, ts.Context())


def test_a_key_is_replaced_only_if_it_has_not_changed_since_it_was_read(storage):
    value, version = storage.read_version("key", 9)
    assert value is None
    first = storage.replace("key", b"first", version, 9)
    assert storage.read_version("key", 9) == (b"first", first)
    assert storage.replace("key", b"again", version, 9) is None
    second = storage.replace("key", b"second", first, 9)
    assert storage.replace("key", None, first, 9) is None
    assert storage.read_version("key", 9) == (b"second", second)
    assert storage.replace("key", None, second, 9)
    assert storage.names() == []


def test_a_store_that_does_not_answer_is_named(tmp_path):
    storage = KeyValueStore(tmp_path)
    _, version = storage.read_version("key", 9)
    with (tmp_path / "key.__lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"key.*no answer in time"):
            storage.replace("key", b"value", version, 0.1)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yield a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


OPEN = {
    "a store": open_store,
    "text": lambda url: find_files([url], "**/*"),
    "some files": lambda url: find_files([f"{url}/*.txt"], "**/*"),
}


@pytest.fixture
def no_kept_clients() -> Iterator[None]:
    """Let no other test use this test's clients, which never forget their server."""
    client = fsspec.get_filesystem_class("s3")
    client.clear_instance_cache()
    yield
    client.clear_instance_cache()


@pytest.mark.usefixtures("no_kept_clients")
@pytest.mark.parametrize("opener", OPEN)
@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/x", "s3://bucket/x"])
def test_a_server_that_does_not_answer_is_named(opener, url, silent_port, monkeypatch):
    for module in (key_value_store, storage_module):
        monkeypatch.setattr(module, "FIRST_ANSWER_S", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    url = url.format(port=silent_port)
    with pytest.raises(DataError, match=rf"{url}.*cannot be read \(no answer in time"):
        OPEN[opener](url)


@pytest.mark.parametrize("opener", OPEN)
def test_an_unreachable_server_is_not_called_a_missing_file(
    opener, closed_port, monkeypatch
):
    monkeypatch.setattr(key_value_store, "HTTP_RETRIES", 1)
    url = f"http://127.0.0.1:{closed_port}/x"
    with pytest.raises(DataError, match=rf"{url}.*cannot be read \(.*[Cc]onnect"):
        OPEN[opener](url)
