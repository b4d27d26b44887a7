"""Compile programs for an absent machine, in a separate process.

    python tests/kernels/ahead.py <folder> <json>

The JSON maps the name of each case to a dict. Its "target" is a name of
hardware/targets.py. One further key says which program is compiled:

- "step": overrides of `python -m train`, for the real training step on all devices.
  "options" are those of the compiler.
- "attention": [T, H], for the kernel and its gradient on one device.
- "grouped": [M, E, D, F], for the same on one device. "dtype" may be float8.
- "scatter": [V, D], for a table's gradient over all devices, columns innermost.

Each optimised program is written to <folder>/<name>.txt. One line of JSON goes to
stdout: {"name", "seconds" (of CPU time), "memory" (bytes)} or {"name", "error"}.

The process is separate because platforms read their settings from the environment once.
"""

import json
import os
import sys
import time
from pathlib import Path

# This process runs on the CPU, and compiles for the target.
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.attention.inputs import Inputs
from model.attention.method import AttentionOptions
from model.choices import Attention, ComputeDtype
from model.gather import WeightPlacement
from model.parts.attention import KernelAttention
from model.parts.eight_bits.recipes import RECIPES
from model.parts.experts.grouped import choose_grouped, grouped_product
from train.cli.command import compose
from train.hardware.collective_steps import collective_steps
from train.hardware.devices import fake_devices, prepare
from train.hardware.targets import parse_target
from train.plan.aot import compile_step, lower_step
from train.resolve.mesh import Device
from train.resolve.program import make_program, settle

KINDS = ("argument", "output", "alias", "temp", "generated_code")


def step(chips: list[Device], overrides: list[str], options: dict[str, bool]):
    config = settle(compose(overrides), vocab_size=512)
    program = make_program(config, devices=chips)
    if not options:
        return compile_step(program)
    options = {"xla_gpu_autotune_level": 0, **options}
    return lower_step(program)[1].compile(compiler_options=options)


def kernel(chips: list[Device], platform: str, T: int, H: int):
    kernels = {"tpu": Attention.splash, "cuda": Attention.cudnn}
    sharding = jax.sharding.SingleDeviceSharding(chips[0])

    def loss(q, k, v, segment_ids):
        method = KernelAttention(kernels[platform])
        out = method.attend(
            Inputs(q, k, v, segment_ids), AttentionOptions(jnp.bfloat16)
        )
        return out.o_BTNV.astype(jnp.float32).sum()

    def array(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    kv = array(1, T, 2, H)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(
        array(1, T, 4, H), kv, kv, array(1, T, dtype=jnp.int32)
    )
    options = {"xla_gpu_autotune_level": 0} if platform == "cuda" else None
    return traced.lower(lowering_platforms=(platform,)).compile(options)


def grouped(chips: list[Device], platform: str, dtype: str | None, *sizes: int):
    sharding = jax.sharding.SingleDeviceSharding(chips[0])
    M, E, D, F = sizes
    float8 = RECIPES[ComputeDtype(dtype)]() if dtype else None

    def loss(x, w, sizes):
        body = choose_grouped(platform)
        y = grouped_product(x, w, sizes, jnp.bfloat16, body, float8)
        return jnp.square(y.astype(jnp.float32)).sum()

    shapes = ((M, D), jnp.bfloat16), ((E, D, F), jnp.float32), ((E,), jnp.int32)
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays)
    options = {"xla_gpu_autotune_level": 0} if platform == "cuda" else None
    return traced.lower(lowering_platforms=(platform,)).compile(options)


def scatter(chips: list[Device], V: int, D: int):
    mesh = Mesh(np.array(chips), ("fsdp",))
    placement = WeightPlacement(
        ((1, ("fsdp",)),),
        reduce_dtype=jnp.bfloat16,
        platform="tpu",
        axis_steps=collective_steps(mesh),
    )

    # The table has rows for all tokens. Its columns lie along lanes, as those of the
    # gradient of a tied head do.
    def gradient(x, y):
        table = with_layout_constraint(jnp.einsum("bd,bv->vd", x, y), Layout((0, 1)))
        return placement.reduce_scatter(table)

    rows = PartitionSpec("fsdp")
    columns = PartitionSpec(None, "fsdp")
    program = jax.shard_map(
        gradient, mesh=mesh, in_specs=(rows, rows), out_specs=columns, check_vma=False
    )
    sharding = NamedSharding(mesh, rows)
    arrays = [
        jax.ShapeDtypeStruct((128 * len(chips), n), jnp.bfloat16, sharding=sharding)
        for n in (D, V)
    ]
    return jax.jit(program).lower(*arrays).compile()


def main(folder: Path, cases: dict) -> None:
    prepare()
    for name, case in cases.items():
        target = parse_target(case["target"])
        start = time.process_time()
        try:
            chips = fake_devices(target)
            if "step" in case:
                compiled = step(chips, case["step"], case.get("options", {}))
            elif "grouped" in case:
                arguments = target.platform, case.get("dtype")
                compiled = grouped(chips, *arguments, *case["grouped"])
            elif "scatter" in case:
                compiled = scatter(chips, *case["scatter"])
            else:
                compiled = kernel(chips, target.platform, *case["attention"])
        except Exception as error:
            print(json.dumps({"name": name, "error": str(error)}), flush=True)
            continue
        (folder / f"{name}.txt").write_text(compiled.as_text())
        memory = compiled.memory_analysis()
        result = {
            "name": name,
            "seconds": round(time.process_time() - start, 1),
            "memory": {
                kind: getattr(memory, f"{kind}_size_in_bytes") for kind in KINDS
            },
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
