"""Orbax, opened with our settings, and what it does not do yet.

- s3://, which it does not know, is addressed as it addresses gs://. TensorStore, with
  which Orbax reads and writes arrays, has a driver for both; all else goes through
  fsspec. So several processes save and restore as they do under gs://, and a step
  counts once `commit_success.txt` is there: nothing is renamed.
- A failed save is an exception that `run/checkpoint.py` is given and tells in a line.
  Orbax logs it too, seven times over, with tracebacks; and what is left to do is
  reported to an event loop that Orbax has closed: a thousand lines in all, left out.

Source: orbax-checkpoint 0.12.8, tensorstore 0.1.80.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, cast

from etils import epath

from data.key_value_store import KeyValueStore
from data.storage import is_remote
from train.config import CheckpointConfig
from train.run.digests import check_descriptions

SCORE = "eval/loss"  # the metric that is saved beside a step that was evaluated


def open_orbax(directory: epath.Path, keep: CheckpointConfig | None = None) -> Any:
    """Open a folder of checkpoints, made if missing: an `ocp.training.Checkpointer`.

    `keep` says which steps to keep when others are saved; None: only to read.

    Raises:
        DataError: what a step says of itself cannot be opened.
    """
    from orbax.checkpoint import v1 as ocp  # a second: beside the compilation

    quiet_failed_saves()
    check_descriptions(directory)
    policies = ocp.training.preservation_policies
    context = ocp.Context()
    # Which arrays may be padded, and which are left unread, contents.py decides.
    context.array.loading.enable_padding_and_truncation = True
    context.pytree.loading.partial_load = True
    if os.fspath(directory).startswith("s3://"):
        _bring_s3_to_orbax()
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    if keep is None:
        return ocp.training.Checkpointer(
            directory, context=context, cleanup_tmp_directories=False
        )
    preserved: list[Any] = [policies.LatestN(keep.keep_latest)]
    if keep.keep_every_steps:
        preserved.append(policies.EveryNSteps(keep.keep_every_steps))
    if keep.keep_best:
        preserved.append(
            policies.BestN(
                get_metric_fn=lambda metrics: -metrics[SCORE],  # the highest is
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
    return ocp.training.Checkpointer(
        directory,
        context=context,
        preservation_policy=cast(Any, policies.AnyPreservationPolicy(preserved)),
        cleanup_tmp_directories=not is_remote(directory),
    )


@functools.cache
def quiet_failed_saves() -> None:
    """Drop what Orbax and its event loop log of a save that failed.

    Other libraries log through absl too: their tracebacks are kept.
    """
    import orbax.checkpoint  # a second: beside the compilation

    (folder,) = orbax.checkpoint.__path__
    logging.getLogger("absl").addFilter(
        lambda record: not (record.exc_info and record.pathname.startswith(folder))
    )
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


@functools.cache
def _bring_s3_to_orbax() -> None:
    """Have Orbax address s3:// as it addresses gs://.

    Source: can go with https://github.com/google/orbax/pull/2739.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = tensorstore_utils.build_kvstore_tspec
    tensorstore_utils.build_kvstore_tspec = _with_s3(build)


def _with_s3(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(build)
    def build_kvstore_tspec(directory: str, *args: Any, **kwargs: Any):
        if not directory.startswith("s3://"):
            return build(directory, *args, **kwargs)
        spec = build(directory.replace("s3://", "gs://", 1), *args, **kwargs)
        base = spec["base"] if spec["driver"] == "ocdbt" else spec
        base |= KeyValueStore(f"s3://{base['bucket']}").spec() | {"path": base["path"]}
        return spec

    return build_kvstore_tspec
