"""Open Orbax with our settings, and work around its known gaps.

- Orbax does not support s3://, so this module makes it handle s3:// like gs://. For
  both, TensorStore reads and writes the arrays, and fsspec reads and writes all other
  files. A step is complete once `commit_success.txt` exists; no folder is renamed.
- `run/checkpoint.py` reports a failed save in one line. Orbax also logs this failure
  seven times with tracebacks. It leaves unfinished work to an event loop that is then
  closed; when Python discards this work, it reports the exception "Event loop is
  closed". This module drops these messages.

Source: orbax-checkpoint 0.12.8, tensorstore 0.1.80.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from etils import epath

from data.errors import DataError
from data.key_value_store import KeyValueStore
from data.storage import is_remote
from train.config import CheckpointConfig
from train.run.digests import DESCRIPTION, read_description, saved_steps
from train.run.folder import check_checkpoints

# The metrics that are saved with an evaluated step. Only losses of the same rows, which
# have the same number of targets, are comparable.
SCORE = "eval/loss"
TARGETS = "eval/targets"


def open_orbax(directory: epath.Path, retention: CheckpointConfig | None = None) -> Any:
    """Return an `ocp.training.Checkpointer` for a folder, which is made if missing.

    `retention` says which steps survive later saves; with None the folder is only read.

    Raises:
        DataError: something in the folder is not what it must be.
    """
    from orbax.checkpoint import v1 as ocp  # the import takes a second

    quiet_failed_saves()
    check_checkpoints(directory)
    policies = ocp.training.preservation_policies
    context = ocp.Context()
    # contents.py decides which arrays may be left unread.
    context.pytree.loading.partial_load = True
    if os.fspath(directory).startswith("s3://"):
        _patch_orbax_for_s3()
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    if retention is None:
        return _open(directory, context=context, cleanup_tmp_directories=False)
    preserved: list[Any] = [policies.LatestN(retention.keep_latest)]
    if retention.keep_every_steps:
        preserved.append(policies.EveryNSteps(retention.keep_every_steps))
    if retention.keep_best:
        preserved.append(_KeepBest())
    return _open(
        directory,
        context=context,
        preservation_policy=cast(Any, policies.AnyPreservationPolicy(preserved)),
        cleanup_tmp_directories=not is_remote(directory),
    )


def _open(directory: epath.Path, **options: Any) -> Any:
    """Open a folder; Orbax skips descriptions that are no JSON, but not all others."""
    from orbax.checkpoint import v1 as ocp

    try:
        return ocp.training.Checkpointer(directory, **options)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        damaged = [
            step
            for step in saved_steps(directory)
            if read_description(directory / str(step)) is None
        ]
        raise DataError(
            f"{directory}: the file {DESCRIPTION} of a step is damaged ({error}). Move "
            f"the folder of that step elsewhere, or put back what a copy of the run "
            f"has there. Its digest differs in the steps {damaged}"
        ) from error


class _KeepBest:
    """Orbax's policy that keeps, for all scores of the same rows, the best step."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any):
        """Return for each checkpoint whether it is kept."""
        best = dict[float | None, int]()
        for i, checkpoint in enumerate(checkpoints):
            metrics = checkpoint.metrics or {}
            if SCORE not in metrics:
                continue
            earlier = best.setdefault(metrics.get(TARGETS), i)
            if metrics[SCORE] <= checkpoints[earlier].metrics[SCORE]:
                best[metrics.get(TARGETS)] = i
        return [i in best.values() for i in range(len(checkpoints))]


@functools.cache
def quiet_failed_saves() -> None:
    """Drop the tracebacks that Orbax and its event loop log after a failed save.

    Tracebacks that other libraries log through absl are still shown.
    """
    import orbax.checkpoint  # the import takes a second

    (folder,) = orbax.checkpoint.__path__
    logging.getLogger("absl").addFilter(
        lambda record: not (record.exc_info and record.pathname.startswith(folder))
    )
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous_hook(unraisable)

    sys.unraisablehook = hook


@functools.cache
def _patch_orbax_for_s3() -> None:
    """Make Orbax build TensorStore specs for s3:// as it does for gs://.

    https://github.com/google/orbax/pull/2739 would make this patch superfluous.
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
