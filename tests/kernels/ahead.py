"""Compile for a machine that is not there; a process of its own.

    python tests/kernels/ahead.py <folder> <json>

The JSON maps a name to what is to be compiled: {"platform": "tpu" or "cuda",
"topology": ..., and either "step": overrides of `python -m train` (the real training
step on all devices) or "attention": [T, H] (the kernel and its gradient on one)}.
For each the optimised program goes to <folder>/<name>.txt, and one line of JSON,
{"name", "seconds" (of CPU time), "temp_bytes"} or {"name", "error"}, to stdout.

A process of its own because platforms read their settings from the environment once.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",  # what runs; what is compiled for is named by the topology
    "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server what machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # as it drives none, it need not be alone
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # accepts that there is no driver
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # which would need a device
}
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from hydra import compose, initialize_config_dir
from jax.experimental import topologies

from model.attention import attention
from model.config import Attention
from train.check import CONFIG_DIR, VERSION_BASE, register
from train.config import Config
from train.program import make_program, settle
from train.schema import load

# Source: openxla/xla, xla/backends/gpu/target_config/specs/h100_sxm.txtpb.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(platform: str, topology: str) -> list[jax.Device]:
    if platform == "cuda":  # topology: slices x hosts x GPUs of a host
        described = topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology=topology
        )
    else:
        described = topologies.get_topology_desc(
            platform="tpu",
            topology_name=topology,
            chip_config_name="default",
            chips_per_host_bounds=(2, 2, 1),
        )
    return list(described.devices)


def step(chips: list[jax.Device], platform: str, overrides: list[str]):
    register(Config)
    with initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        config = settle(load(compose("train", overrides)), vocab_size=512)
    program = make_program(config, devices=chips)
    with jax.set_mesh(program.mesh):
        traced = program.train_step.trace(program.state, program.batch)
        return traced.lower(lowering_platforms=(platform,)).compile()


def kernel(chips: list[jax.Device], platform: str, T: int, H: int):
    kernels = {"tpu": Attention.splash, "cuda": Attention.cudnn}
    place = jax.sharding.SingleDeviceSharding(chips[0])

    def loss(q, k, v, segment_ids):
        out = attention(
            q,
            k,
            v,
            segment_ids,
            implementation=kernels[platform],
            compute=jnp.bfloat16,
        )
        return out.astype(jnp.float32).sum()

    def array(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    kv = array(1, T, 2, H)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(
        array(1, T, 4, H), kv, kv, array(1, T, dtype=jnp.int32)
    )
    return traced.lower(lowering_platforms=(platform,)).compile()


def main(folder: Path, cases: dict) -> None:
    for name, case in cases.items():
        platform, started = case["platform"], time.process_time()
        try:
            chips = devices(platform, case["topology"])
            if "step" in case:
                compiled = step(chips, platform, case["step"])
            else:
                compiled = kernel(chips, platform, *case["attention"])
        except Exception as error:
            print(json.dumps({"name": name, "error": str(error)}), flush=True)
            continue
        (folder / f"{name}.txt").write_text(compiled.as_text())
        result = {
            "name": name,
            "seconds": round(time.process_time() - started, 1),
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
