"""The private API of JAX that this package needs, for want of a public door to it.

Checked against jax 0.10.2 and 0.12.0; each use can go once JAX exports it.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state


def key_values() -> Any:
    """Return the client of JAX's key-value store, once `jax.distributed` has begun."""
    return global_state.client


def detect_place(
    address: str | None, processes: int | None, process: int | None, timeout_s: int
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Ask JAX's detection for what is None, and for the local device ids."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one says that Kubernetes needs a package
        return ClusterEnv.auto_detect_unset_distributed_params(
            address, processes, process, None, None, timeout_s
        )
