"""Orbax on s3://, which it does not know: addressed as it addresses gs://.

TensorStore, with which Orbax reads and writes arrays, has a driver for both. All else
goes through fsspec. So several processes save and restore as they do under gs://, and a
step counts once `commit_success.txt` is there: nothing is renamed.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils

from data.token_store.storage import Storage


def orbax_context(directory: epath.Path) -> ocp.Context:
    """Give Orbax's settings for a folder of checkpoints."""
    context = ocp.Context()
    if os.fspath(directory).startswith("s3://"):
        _bring_s3_to_orbax()
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    return context


@functools.cache
def _bring_s3_to_orbax() -> None:
    """Have Orbax address s3:// as it addresses gs://.

    Source: orbax-checkpoint 0.12.8; can go with
    https://github.com/google/orbax/pull/2739.
    """
    build = tensorstore_utils.build_kvstore_tspec
    tensorstore_utils.build_kvstore_tspec = _with_s3(build)


def _with_s3(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(build)
    def build_kvstore_tspec(directory: str, *args: Any, **kwargs: Any):
        if not directory.startswith("s3://"):
            return build(directory, *args, **kwargs)
        spec = build(directory.replace("s3://", "gs://", 1), *args, **kwargs)
        base = spec["base"] if spec["driver"] == "ocdbt" else spec
        base |= Storage(f"s3://{base['bucket']}").spec() | {"path": base["path"]}
        return spec

    return build_kvstore_tspec
