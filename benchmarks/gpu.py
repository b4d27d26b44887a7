"""What Longhaul does on one GPU: whether it is right, how fast, and what matters.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --json gpu.json --parts check run
    python -m benchmarks.gpu --device cpu    # to try this program where there is none

check    losses of 40 steps are those of this machine's CPU, in float32 and in
         bfloat16; cuDNN's attention is in the compiled step
run      `python -m train`, killed and started again, ends with the same bits; its
         loss is that of the CPU
speed    of each preset against PyTorch: compiled, bfloat16, its own flash attention,
         fused AdamW. Each at the batch with which it makes most tokens a second, in
         turns, each turn a process of its own: both may want all of the memory
levers   the first preset's step with one thing changed at a time
profile  `python -m train` of that preset: its speed, and time by scope and kind

What a part finds is in the file as soon as it is known, beside what the file holds
from other parts; a part that fails is named at the end, exit code 1.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    CHECK_STEPS,
    Contender,
    EndedEarly,
    print_rows,
    rows_of,
    setting,
)
from benchmarks.step_worker import PRESETS, Spec
from data.machine import usable_cores
from train.hardware.chips import peak_flops

BATCH_SIZES = {  # tried from the smallest, until no more fit or speed falls
    "nano": (12, 24),
    "gpt2_124m": (16, 32, 64, 128),
    "gpt2_1558m": (4, 8, 16, 32),
}
DEFAULT_PRESETS = {"cpu": ["nano"], "gpu": ["gpt2_124m", "gpt2_1558m"]}
ALONE = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
}
AS_TYPED = ("model.layer_unroll=1",)  # as a model has it if nothing is typed
BLOCKS, STEPS, TURNS = 3, 20, 3  # of each contender; a turn is that many blocks
CONTENDERS = "torch-compile-bf16", "longhaul"
LEVERS: dict[str, tuple[str, ...]] = {  # overrides, or flags of XLA
    "layers unrolled": ("model.layer_unroll=-1",),
    "documents masked": ("data.document_mask=true",),
    "moments in bfloat16": ("optimizer.moment_dtype=bfloat16",),
    "moments in int8": ("optimizer.moment_dtype=int8",),
    "loss in tiles": ("train.loss_chunk_tokens=8192",),
    "everything recomputed": ("train.remat=full",),
    "products in float8": ("model.compute_dtype=float8",),
    "no products merged": ("--xla_gpu_dot_merger_threshold_mb=0",),
    "no products by Triton": ("--xla_gpu_enable_triton_gemm=false",),
    "no command buffers": ("--xla_gpu_enable_command_buffer=",),
    "latency hiding": ("--xla_gpu_enable_latency_hiding_scheduler=true",),
}


def check(first: Spec, presets: Sequence[str]) -> dict[str, Any]:
    """Compare losses with the CPU's; look for cuDNN's attention."""
    found: dict[str, Any] = {}
    reference: list[float] = []
    for device, float32, tolerance in (
        ("cpu", True, 0.0),
        (first.device, True, 2e-3),  # its products round to TF32
        (first.device, False, 2e-2),
    ):
        name = f"{device}, {'float32' if float32 else 'auto'}"
        spec = replace(first, preset="nano", device=device, float32=float32)
        with running(spec) as worker:
            losses = [worker.ask(f"run {n}")["loss"] for n in (1, CHECK_STEPS)]
        found[name], reference = losses, reference or losses
        print(f"{name}: loss {losses[0]:.5f} -> {losses[1]:.5f}", flush=True)
        require(losses[1] < 0.95 * losses[0], f"{name}: the loss does not fall")
        for loss, wanted in zip(losses, reference, strict=True):
            require(abs(loss / wanted - 1) <= tolerance, f"{name}: not the CPU's")
    with running(replace(first, batch_size=4)) as worker:
        found["kernels"] = worker.ask("kernels")
    print(f"kernels: {found['kernels']}", flush=True)
    fused = any("fmha" in name for name in found["kernels"])
    require(fused or first.device == "cpu", "cuDNN's attention is not in the step")
    return found


def run(first: Spec, presets: Sequence[str]) -> dict[str, Any]:
    """Kill `python -m train` and start it again; the same on the CPU."""
    typed = ["train.num_steps=60", "checkpoint.save_interval_steps=10"]
    typed += ["eval.final_num_batches=4", "runtime.deterministic=true"]
    with tempfile.TemporaryDirectory() as folder:
        whole, killed, cpu = (Path(folder, name) for name in ("whole", "killed", "cpu"))
        train(whole, typed)
        process = subprocess.Popen(command(killed, typed))
        while not any((killed / "checkpoints").glob("[2-5]0")):
            require(process.poll() is None, "it ended before it was killed")
            time.sleep(0.02)
        process.kill()
        process.wait()
        train(killed, typed)
        train(cpu, [*typed, "runtime.platform=cpu"])
        losses = {
            path.name: results(path)["eval/loss"] for path in (whole, killed, cpu)
        }
    print(f"validation loss: {losses}", flush=True)
    require(losses["whole"] == losses["killed"], "other bits after it was killed")
    near = abs(losses["whole"] / losses["cpu"] - 1) < 2e-2
    require(near, "the loss is not the CPU's")
    return losses


def speed(first: Spec, presets: Sequence[str]) -> dict[str, Any]:
    """Compare each preset's step with PyTorch's."""
    found = {}
    for preset in presets:
        specs = [replace(first, preset=preset, name=name) for name in CONTENDERS]
        tuned = {spec.name: tune(spec) for spec in specs}
        best = [replace(spec, batch_size=fastest(tuned[spec.name])) for spec in specs]
        found[preset] = {"tuned": tuned, **in_turns(best)}
    return found


def levers(first: Spec, presets: Sequence[str]) -> dict[str, Any]:
    """Change one thing at a time; the step as it is comes between, too."""
    base = replace(first, batch_size=fastest(tune(first)))
    as_is, changed = [tokens_per_s(base)], {}
    for number, (name, changes) in enumerate(LEVERS.items(), 1):
        flags = [change for change in changes if change.startswith("--")]
        own = {"XLA_FLAGS": flags[0]} if flags else {}
        keys = [change for change in changes if not change.startswith("--")]
        spec = replace(
            base,
            overrides=(*base.overrides, *keys),
            environment={**base.environment, **own},
        )
        try:
            changed[name] = tokens_per_s(spec)
        except EndedEarly:
            changed[name] = None
        if number % 4 == 0:
            as_is.append(tokens_per_s(base))
    for name, tokens in changed.items():
        said = f"{tokens / statistics.median(as_is):.3f} x" if tokens else "did not run"
        print(f"{name} ({' '.join(LEVERS[name])}): {said}", flush=True)
    return {"setting": setting(base), "as_is": as_is, "tokens_per_s": changed}


def profile(first: Spec, presets: Sequence[str]) -> dict[str, Any]:
    """Train as one types it, and profile that."""
    typed = ["optimizer=adamw", "train.num_steps=60", "profile.steps=[40,45]"]
    typed += ["eval.interval_steps=1000", "eval.final_num_batches=1"]
    if first.device == "gpu":
        typed += [f"model={presets[0]}", "data.sequence_length=1024"]
        typed += [f"data.batch_size={PRESETS[presets[0]].batch_size}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        train(path, typed)
        shown = [sys.executable, "-m", "train.profile", f"run.dir={path}", "step=40"]
        text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
        logged = (path / "metrics.jsonl").read_text().splitlines()
    print(text, flush=True)
    return {"typed": typed, "metrics": list(map(json.loads, logged)), "profile": text}


PARTS: dict[str, Callable[[Spec, Sequence[str]], dict[str, Any]]] = {
    part.__name__: part for part in (check, run, speed, levers, profile)
}


def require(holds: bool, otherwise: str) -> None:
    """Fail a part, with what is wrong."""
    if not holds:
        raise SystemExit(otherwise)


@contextmanager
def running(spec: Spec) -> Iterator[Contender]:
    """Have a contender that has done its first step."""
    worker = Contender(spec)
    try:
        worker.ask("warm")
        yield worker
    finally:
        worker.quit()


def tokens_per_s(spec: Spec) -> float:
    """Time a contender alone."""
    with running(spec) as worker:
        for _ in range(BLOCKS):
            worker.run(STEPS)
    return spec.shape.tokens / statistics.median(worker.blocks)


def tune(spec: Spec) -> dict[int, float]:
    """Return tokens a second by batch size, up to the first that is worse or too much.

    Raises:
        SystemExit: none fits.
    """
    found: dict[int, float] = {}
    for batch_size in BATCH_SIZES[spec.preset]:
        try:
            speed = tokens_per_s(replace(spec, batch_size=batch_size))
        except EndedEarly:
            break
        print(f"{spec.name}: {batch_size} rows: {speed:,.0f} tokens/s", flush=True)
        worse = bool(found) and speed < max(found.values())
        found[batch_size] = speed
        if worse:
            break
    require(bool(found), f"{spec.name}: no batch of {spec.preset} fits")
    return found


def fastest(tuned: dict[int, float]) -> int:
    """Return the batch size of most tokens a second."""
    return max(tuned, key=lambda batch_size: tuned[batch_size])


def in_turns(specs: Sequence[Spec]) -> dict[str, Any]:
    """Time contenders, one process at a time; every other round runs backwards."""
    blocks: dict[str, list[float]] = {spec.name: [] for spec in specs}
    ended: dict[str, Contender] = {}
    for turn in range(TURNS):
        for spec in specs[:: -1 if turn % 2 else 1]:
            with running(spec) as worker:
                for _ in range(BLOCKS):
                    worker.run(STEPS)
            worker.blocks = blocks[spec.name] = blocks[spec.name] + worker.blocks
            ended[spec.name] = worker
    found = setting(specs[-1])
    found["rows"] = rows_of(list(ended.values()), peak_flops(found["hardware"]))
    print_rows(found["rows"], specs[-1].device)
    return found


def command(path: Path, typed: Sequence[str]) -> list[str]:
    """Return that of a run whose directory is `path`."""
    return [sys.executable, "-m", "train", f"run.dir={path}", "tracker=none", *typed]


def train(path: Path, typed: Sequence[str]) -> None:
    """Train, or go on."""
    subprocess.run(command(path, typed), check=True)


def results(path: Path) -> dict[str, Any]:
    """Read what a run ended with."""
    return json.loads((path / "results.json").read_text())


def main() -> None:
    """Do the parts that are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--presets", nargs="+", choices=BATCH_SIZES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    presets = options.presets or DEFAULT_PRESETS[options.device]
    first = Spec(
        *("longhaul", presets[0], options.device, usable_cores()),
        overrides=AS_TYPED,
        environment=ALONE,
    )
    failed = []
    for part in options.parts:
        print(f"--- {part}", flush=True)
        began = time.monotonic()
        try:
            found = PARTS[part](first, presets)
        except (SystemExit, subprocess.CalledProcessError) as error:
            failed.append(f"{part}: {error}")
            found = {"failed": str(error)}
        found = {**found, "seconds": time.monotonic() - began}
        if options.json:
            there = options.json.exists() and json.loads(options.json.read_text())
            text = json.dumps({**(there or {}), part: found}, indent=1)
            options.json.write_text(text + "\n")
    print("\n".join(["--- failed", *failed] if failed else ["--- all parts hold"]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
