"""The private API of JAX that this package needs because there is no public one.

Checked against jax 0.10.2 and 0.12.0; each use can go once JAX exports it.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state


def key_value_client() -> Any:
    """Return JAX's key-value client; None before `jax.distributed` is initialised."""
    return global_state.client


def detect_place(
    address: str | None, processes: int | None, process: int | None, timeout_s: int
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Replace each None by what JAX detects; return also the local device ids."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a package for Kubernetes
        return ClusterEnv.auto_detect_unset_distributed_params(
            address, processes, process, None, None, timeout_s
        )
