"""The private API of JAX that this package needs because there is no public one.

Checked against jax 0.10.2 and 0.12.0. Each use can go once JAX exports the name.
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
    """Replace each None by the value that JAX detects; also return local device ids."""
    with warnings.catch_warnings():
        # JAX warns if the package `kubernetes` is missing; detection.py explains this.
        warnings.simplefilter("ignore")
        return ClusterEnv.auto_detect_unset_distributed_params(
            address, processes, process, None, None, timeout_s
        )
