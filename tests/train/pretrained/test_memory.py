"""A start from a folder takes little more memory than what it reads."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from model.catalog import MODEL_PARTS
from model.gpt import abstract_gpt, params_of
from model.params import named, param_infos
from tests.fleet import REPOSITORY
from tests.program import program_code
from tests.train.pretrained.conftest import BYTES
from train.cli.command import compose
from train.pretrained.families import family_of
from train.pretrained.folder import exported_settings
from train.pretrained.tensors import FamilyTensors

# This runs in a separate process, since memory of other tests would count.
START = """
import sys, threading, time

import jax

from train.cli.command import compose
from train.pretrained.begin import start_from
from train.resolve.program import make_program

def anonymous():
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])

def watch():
    while not done:
        seen.append(anonymous())
        time.sleep(0.002)

jax.config.update("jax_num_cpu_devices", 8)
program = make_program(compose(sys.argv[2:]), jax.devices())
done, seen = False, [anonymous()]
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
state = jax.block_until_ready(start_from(sys.argv[1], program))
done = True
watcher.join()
print(max(seen) - seen[0])
"""
OVERRIDES = (
    *("model=llama3_1b", "model.layer_unroll=1", "mesh=fsdp", "optimizer=adafactor"),
    *("data.batch_size=8", "data.sequence_length=64", "tracker=none"),
)
SMALL = ("model.num_layers=4", "model.vocab_size=16384")  # llama3_1b has 16, 128,256


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_eight_devices_need_less_than_1_5_times_the_weights(tmp_path):
    """Optimizers that keep moments need memory for them in addition."""
    model = compose([*OVERRIDES, *SMALL]).model
    abstract = abstract_gpt(model, MODEL_PARTS)
    family = family_of(model)
    parts = FamilyTensors(family, model, param_infos(abstract), model.vocab_size or 0)
    shapes = parts.shapes(dict(named(params_of(abstract))))
    rng = np.random.default_rng(0)
    weight_map = {}
    for number, (name, shape) in enumerate(shapes.items()):
        weight_map[name] = f"{number}.safetensors"
        array = rng.standard_normal(shape, np.float32)
        save_file({name: array}, tmp_path / weight_map[name])
    settings = exported_settings(family, model, BYTES, 64, "float32")
    settings["vocab_size"] = model.vocab_size
    (tmp_path / "config.json").write_text(json.dumps(settings))
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    command = [sys.executable, "-c", program_code(START), str(tmp_path)]
    command += [*OVERRIDES, *SMALL]
    process = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert int(process.stdout) < 1.5 * 4 * sum(map(math.prod, shapes.values()))
