"""Remote stores are prepared from S3 to S3, and read over HTTP."""

import dataclasses
import functools
import http.server
import re
import threading
from pathlib import Path

import pytest

from data.catalog import FORMATS
from data.errors import DataError
from data.token_store import reader
from data.token_store.build import prepare_store
from data.token_store.store import open_store
from data.token_store.verify import verify_store
from tests.data.token_store import preparations
from tests.data.token_store.preparations import content_of, documents_of, refuse

records = preparations.records
config = preparations.config


def test_a_store_is_prepared_from_s3_to_s3(bucket, config, records, tmp_path):
    prepare_store(config, FORMATS)
    bucket.put(f"{records}/", "bucket/in", recursive=True)
    remote_config = dataclasses.replace(
        config, input="s3://bucket/in", output="s3://bucket/stores/far"
    )
    assert prepare_store(remote_config, FORMATS).path == remote_config.output
    local_content = content_of(tmp_path / "store")
    remote_content = {
        name.removeprefix("bucket/stores/far/"): bucket.cat_file(name)
        for name in bucket.find("bucket/stores/far")
    }
    assert remote_content.keys() == local_content.keys()
    path_dependent = {"manifest.json", "manifest.json.sha256"}
    assert {
        name for name in local_content if remote_content[name] != local_content[name]
    } == path_dependent
    assert list(verify_store(open_store(remote_config.output or ""))) == []
    prepare_store(remote_config, FORMATS)
    refuse(remote_config, "other input or settings", validation=0.2)
    bucket.pipe_file("bucket/mine/file", b"mine")
    refuse(remote_config, "is no token store", output="s3://bucket/mine")
    bucket.pipe_file("bucket/stores/far/train/tokens/c/0", b"damaged")
    reports = list(verify_store(open_store(remote_config.output or "")))
    assert ["s3://bucket/stores/far/train/tokens" in report for report in reports]
    refuse(remote_config, "s3://nowhere/x", output="s3://nowhere/x")


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serve byte ranges, which real servers support and Python's server does not."""

    def log_message(self, *_: object) -> None:
        pass

    def send_head(self):
        byte_range = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not byte_range or not path.is_file():
            return super().send_head()
        content = path.read_bytes()
        low = int(byte_range[1] or -int(byte_range[2]))
        high = len(content)
        if byte_range[1] and byte_range[2]:
            high = int(byte_range[2]) + 1
        low = max(0, low if low >= 0 else high + low)
        part = content[low:high]
        self.send_response(206)
        content_range = f"bytes {low}-{low + len(part) - 1}/{len(content)}"
        self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


def test_a_store_is_read_over_http(config, tmp_path, monkeypatch):
    local_store = prepare_store(config, FORMATS)
    Path(local_store.path, "nothing").mkdir()
    monkeypatch.setattr(reader, "MEMORY_LIMIT_BYTES", 0)
    monkeypatch.setattr(reader, "OFFSETS_LIMIT", 0)
    handler = functools.partial(Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/store"
        store = open_store(url)
        assert documents_of(store) == documents_of(local_store)
        assert list(verify_store(store)) == []
        with pytest.raises(DataError, match=r"nothing/manifest\.json: is not there"):
            open_store(f"{url}/nothing")
        Path(local_store.path, "train/ids/c/0").unlink()
        with pytest.raises(DataError, match="store/train/ids"):
            documents_of(open_store(url))
        server.shutdown()
