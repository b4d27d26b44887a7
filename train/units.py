"""Format bytes, counts, FLOPs, durations and lists for people."""

from collections.abc import Iterable, Sequence


def format_bytes(size: float) -> str:
    """Return bytes in binary units: `512 B`, `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.995 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"


def format_count(count: float) -> str:
    """Return a count with about three digits: `950`, `12.4K`, `124M`, `1.24B`."""
    return "".join(_shorten(count, ("", "K", "M", "B", "T")))


def format_flops(flops: float, unit: str = "FLOPs") -> str:
    """Return FLOPs or FLOP/s in decimal units: `4.23 GFLOPs`, `990 TFLOP/s`."""
    digits, prefix = _shorten(flops, ("", "K", "M", "G", "T", "P", "E"))
    return f"{digits} {prefix}{unit}"


def _shorten(count: float, units: Sequence[str]) -> tuple[str, str]:
    for unit in units:
        if abs(count) < 999.5 or unit == units[-1]:
            break
        count /= 1000
    return f"{count:.3g}" if abs(count) < 999.5 else f"{count:,.0f}", unit


def format_seconds(seconds: float) -> str:
    """Return a duration in its two leading units: `12 ms`, `3.2 s`, `1 h 02 min`.

    A positive duration is not rounded to zero: `300 µs`.
    """
    if seconds <= 0:
        return "0 s"
    for unit, scale in (("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        if 0.9995 <= seconds * scale < 999.5:
            return f"{seconds * scale:.0f} {unit}"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {whole_seconds:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours:02d} h"


def few(names: Sequence[str], limit: int = 3) -> str:
    """Join the first names of a list, and say how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def process_names(processes: Iterable[int]) -> str:
    """Format numbers as `process 3` or `processes 3, 5, 6`, at most ten of them."""
    numbers = [*map(str, sorted(processes))]
    return f"process{'es' * (len(numbers) > 1)} {few(numbers, limit=10)}"
