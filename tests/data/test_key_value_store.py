import fcntl

import pytest
import tensorstore as ts

from data.errors import DataError
from data.key_value_store import KeyValueStore


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path) -> KeyValueStore:
    where = {"local": str(tmp_path), "memory": "memory://folder"}[request.param]
    return KeyValueStore(where, ts.Context())


def test_a_key_is_replaced_only_while_it_is_what_was_read(storage):
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
