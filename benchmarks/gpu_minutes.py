"""Use a GPU that is available for a few minutes: the most important parts come first.

    python -m benchmarks.gpu --minutes 9 --json gpu.json
    python -m benchmarks.gpu --parts documents --json gpu.json    # one of the parts

The parts, in this order:

check      as in benchmarks/gpu.py
documents  gpt2_124m, 64 rows of 1,024 positions. Longhaul masks documents; PyTorch has
           no documents and attends to whole rows
large      gpt2_1558m, 8 rows of 1,024
llama      four layers of llama3_8b, 4 rows of 4,096; Longhaul in bfloat16 and in float8
profile    as in benchmarks/gpu.py, of gpt2_124m

`documents`, `large` and `llama` time Longhaul and PyTorch (torch.compile, bfloat16)
alternately, with this number of rows. On a CPU, they time models of the size of nano.

Before each part, the program compares its estimated seconds with those that are left,
and skips the part if it does not fit. The estimate is stated in PARTS, or it is the
time that the part took in an earlier call, if the JSON file has it. A part that takes
more than twice its estimate, or reaches the end of the minutes, is killed together with
its processes; the next part follows.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_turns import in_turns, keep, read
from benchmarks.step_worker import Spec

TORCH = "torch-compile-bf16"
TURNS = 2  # processes of each contender
STEPS = 10  # steps in a block
MARGIN_S = 10.0  # to kill processes and end before the given minutes
# Guessed seconds of each part, with programs that no cache has. The first call on a
# machine replaces them.
PARTS: dict[str, Mapping[str, float]] = {
    "check": {"gpu": 60, "cpu": 60},
    "documents": {"gpu": 110, "cpu": 90},
    "large": {"gpu": 130, "cpu": 90},
    "llama": {"gpu": 160, "cpu": 120},
    "profile": {"gpu": 60, "cpu": 60},
}


def compare(specs: Sequence[Spec], preset: str, rows: int) -> Iterator[dict[str, Any]]:
    """Time the contenders on a preset (on a CPU: on a small one) in turns."""
    if specs[0].device == "cpu":
        preset = "llama_nano" if preset.startswith("llama") else "nano"
        rows = 12
    same = [replace(spec, preset=preset, batch_size=rows) for spec in specs]
    return in_turns(same, turns=TURNS, steps=STEPS)


def documents(first: Spec, presets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compare gpt2_124m, of which Longhaul masks documents, with PyTorch."""
    masked = replace(first, overrides=(*first.overrides, "data.document_mask=true"))
    return compare([masked, replace(first, name=TORCH)], "gpt2_124m", 64)


def large(first: Spec, presets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compare gpt2_1558m with PyTorch."""
    return compare([first, replace(first, name=TORCH)], "gpt2_1558m", 8)


def llama(first: Spec, presets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compare four layers of llama3_8b, in bfloat16 and in float8, with PyTorch."""
    float8 = replace(
        first,
        name="longhaul-float8",
        overrides=(*first.overrides, "model.compute_dtype=float8"),
    )
    return compare([first, replace(first, name=TORCH), float8], "llama3_8b", 4)


def run_part(part: str, device: str, file: Path | None, limit_s: float) -> str | None:
    """Run a part in a process group of its own, and kill the group after the limit.

    Returns:
        The reason if the part failed, or None.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--parts", part]
    command += ["--device", device]
    if file:
        command += ["--json", str(file.absolute())]
    root = Path(__file__).parent.parent
    process = subprocess.Popen(command, cwd=root, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"killed after {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"ended with {code}: see above" if code else None


def run_within(
    minutes: float,
    device: str,
    file: Path | None,
    run: Callable[[str, str, Path | None, float], str | None] = run_part,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run the parts that fit into the minutes; return the failures.

    `run` takes a part, the device, the file and the seconds until it must end, and
    returns the reason if the part failed. The file gets an entry for each part that is
    skipped or killed, next to its results.
    """
    deadline = clock() + 60 * minutes - MARGIN_S
    failures = []
    for part, guesses in PARTS.items():
        earlier = read(file).get(part, {})
        estimate = guesses[device]
        if earlier.get("device") == device:
            estimate = earlier.get("seconds", estimate)
        left = deadline - clock()
        if estimate > left:
            reason = f"needs about {estimate:.0f} s, and {max(left, 0):.0f} s are left"
            print(f"--- {part} is skipped: it {reason}", flush=True)
            keep(file, part, {**earlier, "skipped": reason})
            continue
        failure = run(part, device, file, min(left, 2 * estimate))
        if failure:
            failures.append(f"{part}: {failure}")
            print(f"--- {failures[-1]}", flush=True)
            keep(file, part, {"failed": failure, **read(file).get(part, {})})
    return failures
