"""Check that Longhaul trains correctly on one GPU, and measure its speed.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --json gpu.json --parts check run
    python -m benchmarks.gpu --json gpu.json --minutes 9    # benchmarks/gpu_minutes.py
    python -m benchmarks.gpu --device cpu    # tries this program without a GPU

check    compares the losses of 40 steps, in float32 and in bfloat16, with those of this
         machine's CPU; checks that the step in bfloat16 contains cuDNN's attention
run      kills `python -m train` and starts it again; checks that its loss is equal to
         that of an uninterrupted run, and close to that of a run on the CPU
speed    compares each preset with PyTorch (torch.compile, bfloat16, PyTorch's attention
         kernel, fused AdamW). Each contender has the batch size of its highest speed
levers   measures the step of the first preset with one setting changed at a time
profile  runs `python -m train` on the first preset, and prints its time by scope and
         kind

In `speed`, the contenders alternate, each time in a new process, because each may need
all of the GPU's memory. The results of a part are written to the JSON file as soon as
they are known; results of other parts stay in the file. The program names the parts
that failed at the end, and exits with 1. Longhaul's processes share the compilation
cache in $JAX_COMPILATION_CACHE_DIR (train/runtime.py), and thus compile a step
once. `--parts` and `--presets` divide a long benchmark into short ones. `--minutes`
does what matters most within a time limit: see benchmarks/gpu_minutes.py, which also
has the parts `documents`, `large` and `llama`.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.contenders import CHECK_STEPS, EndedEarly, setting
from benchmarks.gpu_minutes import TORCH, documents, large, llama, run_within
from benchmarks.gpu_turns import (
    BATCH_SIZES,
    fastest,
    in_turns,
    keep,
    require,
    running,
    tokens_per_s,
    tune,
)
from benchmarks.step_worker import PRESETS, Spec
from data.machine import usable_cores
from data.program import PREFIX

Found = Iterator[dict[str, Any]]  # A part yields each result as soon as it is known.

DEFAULT_PRESETS = {"cpu": ["nano"], "gpu": ["gpt2_124m", "gpt2_1558m"]}
ALONE = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
}
AS_TYPED = ("model.layer_unroll=null",)  # the default; LonghaulWorker sets -1
CONTENDERS = "longhaul", TORCH  # PyTorch last: it may not be installed
LEVERS: dict[str, tuple[str, ...]] = {  # config overrides, or XLA flags
    "layers in a loop": ("model.layer_unroll=1",),
    "only products saved": (
        "train.remat=[query,key,value,attention,attention_output,mlp_up]",
    ),
    "documents masked": ("data.document_mask=true",),
    "documents by offsets": (
        "data.document_mask=true",
        "model.attention=cudnn_packed",
    ),
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


def check(first: Spec, presets: Sequence[str]) -> Found:
    """Compare the losses with the CPU's; check that the step has cuDNN's attention."""
    reference: list[float] = []
    kernels: dict[str, int] = {}
    failures: list[str] = []  # All failures are reported together.
    for device, float32, tolerance in (
        ("cpu", True, 0.0),
        (first.device, True, 2e-3),  # GPUs round the operands of products to TF32.
        (first.device, False, 2e-2),
    ):
        name = f"{device}, {'float32' if float32 else 'auto'}"
        spec = replace(first, preset="nano", device=device, float32=float32)
        if float32:  # cuDNN's attention does not support float32.
            spec = replace(spec, overrides=(*spec.overrides, "model.attention=xla"))
        with running(spec) as worker:
            losses = [worker.ask(f"run {n}")["loss"] for n in (1, CHECK_STEPS)]
            kernels = worker.ask("kernels")
        yield {name: losses}
        print(f"{name}: loss {losses[0]:.5f} -> {losses[1]:.5f}", flush=True)
        reference = reference or losses
        if not losses[1] < 0.95 * losses[0]:
            failures.append(f"{name}: the loss does not fall")
        pairs = zip(losses, reference, strict=True)
        if not all(abs(loss / wanted - 1) <= tolerance for loss, wanted in pairs):
            failures.append(f"{name}: not the CPU's")
    yield {"kernels": kernels}
    print(f"kernels: {kernels}", flush=True)
    if first.device == "gpu" and not any("fmha" in name for name in kernels):
        failures.append("cuDNN's attention is not in the step")
    require(not failures, "; ".join(failures))


def run(first: Spec, presets: Sequence[str]) -> Found:
    """Compare the final losses of an uninterrupted, a killed and a CPU run."""
    overrides = ["train.num_steps=60", "checkpoint.save_interval_steps=10"]
    overrides += ["eval.final_num_batches=4", "runtime.deterministic=true"]
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted, killed, cpu = (
            Path(folder, name) for name in ("whole", "killed", "cpu")
        )
        train(uninterrupted, overrides)
        process = subprocess.Popen(command(killed, overrides))
        while not any((killed / "checkpoints").glob("[2-5]0")):
            require(process.poll() is None, "it ended before it was killed")
            time.sleep(0.02)
        process.kill()
        process.wait()
        train(killed, overrides)
        train(cpu, [*overrides, "runtime.platform=cpu"])
        losses = {
            path.name: results(path)["eval/loss"]
            for path in (uninterrupted, killed, cpu)
        }
    yield losses
    print(f"validation loss: {losses}", flush=True)
    require(losses["whole"] == losses["killed"], "other bits after it was killed")
    is_near = abs(losses["whole"] / losses["cpu"] - 1) < 2e-2
    require(is_near, "the loss is not the CPU's")


def speed(first: Spec, presets: Sequence[str]) -> Found:
    """Compare the speed of each preset's step with PyTorch's."""
    for preset in presets:
        tuned: dict[str, dict[int, float]] = {}
        best: list[Spec] = []
        for name in CONTENDERS:
            spec = replace(first, preset=preset, name=name)
            tuned[name] = tune(spec)
            best.append(replace(spec, batch_size=fastest(tuned[name])))
            yield {preset: {"tuned": tuned}}
        for results_so_far in in_turns(best):
            yield {preset: {"tuned": tuned, **results_so_far}}


def levers(first: Spec, presets: Sequence[str]) -> Found:
    """Measure the step with one setting changed at a time.

    The unchanged step is measured again after every four changes.
    """
    base = replace(first, batch_size=fastest(tune(first)))
    as_is = [tokens_per_s(base)]
    changed = {}
    for number, (name, changes) in enumerate(LEVERS.items(), 1):
        flags = [change for change in changes if change.startswith("--")]
        variables = {"XLA_FLAGS": flags[0]} if flags else {}
        keys = [change for change in changes if not change.startswith("--")]
        spec = replace(
            base,
            overrides=(*base.overrides, *keys),
            environment={**base.environment, **variables},
        )
        try:
            changed[name] = tokens_per_s(spec)
        except EndedEarly:
            changed[name] = None
        if number % 4 == 0:
            as_is.append(tokens_per_s(base))
        tokens = changed[name]
        ratio = f"{tokens / statistics.median(as_is):.3f} x" if tokens else None
        result = ratio or "did not run"
        print(f"{name} ({' '.join(changes)}): {result}", flush=True)
        yield {"setting": setting(base), "as_is": as_is, "tokens_per_s": changed}


def profile(first: Spec, presets: Sequence[str]) -> Found:
    """Run `python -m train` with a profile; yield its metrics and the profile."""
    overrides = ["optimizer=adamw", "train.num_steps=60", "profile.steps=[40,45]"]
    overrides += ["eval.interval_steps=1000", "eval.final_num_batches=1"]
    if first.device == "gpu":
        overrides += [f"model={presets[0]}", "data.sequence_length=1024"]
        overrides += [f"data.batch_size={PRESETS[presets[0]].batch_size}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        train(path, overrides)
        logged = (path / "metrics.jsonl").read_text().splitlines()
        yield {"typed": overrides, "metrics": list(map(json.loads, logged))}
        args = [sys.executable, "-m", f"{PREFIX}train.profile", f"run.dir={path}"]
        args.append("step=40")
        # stderr is not captured, so that errors appear in this program's output.
        text = subprocess.run(args, check=True, stdout=subprocess.PIPE, text=True)
    print(text.stdout, flush=True)
    yield {"profile": text.stdout}


DEFAULT_PARTS = ["check", "run", "speed", "levers", "profile"]
PARTS: dict[str, Callable[[Spec, Sequence[str]], Found]] = {
    part.__name__: part
    for part in (check, run, speed, levers, profile, documents, large, llama)
}


def command(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains in the directory `path` with the `overrides`."""
    return [
        sys.executable,
        "-m",
        f"{PREFIX}train",
        f"run.dir={path}",
        "tracker=none",
        *overrides,
    ]


def train(path: Path, overrides: Sequence[str]) -> None:
    """Start the run in the directory `path`, or continue it."""
    subprocess.run(command(path, overrides), check=True)


def results(path: Path) -> dict[str, Any]:
    """Return the results.json of a finished run."""
    return json.loads((path / "results.json").read_text())


def do(part: str, first: Spec, presets: Sequence[str], file: Path | None) -> str | None:
    """Run a part and write its results; return the reason if it failed, or None.

    The file has the `seconds` of a part that did not fail.
    """
    began = time.monotonic()
    values = dict[str, Any]()

    def add(result: dict[str, Any]) -> None:
        values.update(result)
        keep(file, part, values)

    add({"device": first.device})  # replaces the results of an earlier call
    try:
        for result in PARTS[part](first, presets):
            add(result)
    except SystemExit as error:  # raised by `require`, with a message
        failure = str(error)
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    else:
        add({"seconds": time.monotonic() - began})
        return None
    add({"failed": failure})
    return failure


def main() -> None:
    """Run the chosen parts one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--presets", nargs="+", choices=BATCH_SIZES)
    parser.add_argument("--minutes", type=float, help="end before this time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.minutes:
        if options.parts or options.presets:
            parser.error("--minutes itself chooses the parts and presets")
        # The end of this program must end the group of the part that runs.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        conclude(run_within(options.minutes, options.device, options.json))
    presets = options.presets or DEFAULT_PRESETS[options.device]
    first = Spec(
        *("longhaul", presets[0], options.device, usable_cores()),
        overrides=AS_TYPED,
        environment=ALONE,
    )
    failed = []
    for part in options.parts or DEFAULT_PARTS:
        print(f"--- {part}", flush=True)
        if failure := do(part, first, presets, options.json):
            failed.append(f"{part}: {failure}")
    conclude(failed)


def conclude(failed: Sequence[str]) -> NoReturn:
    """Print which parts failed, and exit with 1 if there are any."""
    print("\n".join(["--- failed", *failed] if failed else ["--- no part failed"]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
