"""Serve metadata as Cloud TPU does for the VMs of two slices of two hosts."""

import contextlib
import http.server
import threading
from collections.abc import Iterator

from data.program import PREFIX


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Answer with the metadata of a Cloud TPU VM: the `attributes` of the server."""

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.attributes[name].encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def metadata_server(process: int) -> Iterator[str]:
    """Serve one host of two slices of two hosts."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    slices = {"COORDINATOR_ADDRESS": "localhost", "NUM_SLICES": 2}
    slices["SLICE_ID"] = process // 2
    server.attributes = {
        "agent-worker-number": f"{process % 2}",
        "worker-network-endpoints": "a:b:127.0.0.1,a:b:127.0.0.1",
        "tpu-env": "\n".join(f"MEGASCALE_{k}: '{v}'" for k, v in slices.items()),
    }
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


# JAX sets the variable at its import if there are no chips, and then sends no query.
AS_ON_A_TPU_VM = (
    "import os, runpy, jax; os.environ.pop('TPU_SKIP_MDS_QUERY', None); "
    f"runpy.run_module('{PREFIX}train', run_name='__main__', alter_sys=True)"
)
