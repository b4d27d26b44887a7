"""The number of usable cores, and the folder of caches."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder() -> Path:
    """Return the folder of caches: $XDG_CACHE_HOME/longhaul or ~/.cache/longhaul."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "longhaul"
