"""Compute the host memory and cores to request from a scheduler.

The plan computes the bytes that a step offloads to one host's memory, and the bytes
that an asynchronous save copies there. The memory to request is the offloaded bytes,
twice the saved bytes, and 16 GiB for each process (libraries, compiler, batches). Eight
cores are requested for each chip. The 16 GiB and the eight cores are generous
estimates. Without a plan the site's defaults apply.
"""

import logging

from launch.job import Job

log = logging.getLogger(__name__)

_PROCESS_BYTES = 16 << 30
_CORES_PER_CHIP = 8
# The assumed rate at which a host writes to an object store or a shared disk.
_SAVE_BYTES_PER_S = 1e9


def host_memory_gib(staged_bytes: int, held_bytes: int, processes: int) -> int:
    """Return the GiB of memory to request for a host with this number of processes."""
    needed = held_bytes + 2 * staged_bytes + processes * _PROCESS_BYTES
    return -(-needed // (1 << 30))


def process_cores(chips: int) -> int:
    """Return the cores to request for a process that drives this number of chips."""
    return _CORES_PER_CHIP * chips


def warn_of_short_notice(job: Job, notice_s: float, source: str) -> None:
    """Warn if a save takes longer than the notice before a kill.

    `source` is the beginning of the message.
    """
    save_s = (job.staged_bytes or 0) / _SAVE_BYTES_PER_S
    if save_s > notice_s:
        log.warning(
            "%s %.0f s, but a save takes about %.0f s at 1 GB/s a host, so steps since "
            "the previous save may be lost. checkpoint.save_interval_minutes limits "
            "how many",
            source,
            notice_s,
            save_s,
        )
