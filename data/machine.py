"""The number of usable cores, the available memory, and the folder of caches."""

import contextlib
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int | None:
    """Return the bytes of memory that are available, or None if they are not known.

    The limit of a container counts as well.
    """
    amounts = list[int]()
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        amounts.append(int(fields["MemAvailable"].split()[0]) * 1024)
    # The files of cgroups version 2 and version 1, as a container sees its own. Cached
    # files count as used there, but the system gives their memory up.
    for limit, usage, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        with contextlib.suppress(OSError, KeyError, ValueError):  # "max": no limit
            limit_bytes = int((_CGROUP / limit).read_text())
            used_bytes = int((_CGROUP / usage).read_text())
            stat = (_CGROUP / limit).with_name("memory.stat").read_text().splitlines()
            cached_bytes = int(dict(line.split() for line in stat)[cached])
            amounts.append(max(0, limit_bytes - used_bytes + cached_bytes))
    return min(amounts, default=None)


def cache_folder() -> Path:
    """Return the folder of caches: $XDG_CACHE_HOME/longhaul or ~/.cache/longhaul."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "longhaul"
