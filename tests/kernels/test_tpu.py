"""The training step for a TPU is compiled on the CPU, and then inspected.

pip install libtpu
python -m pytest tests/kernels/test_tpu.py
"""

import importlib.util
import re
from collections import Counter

import pytest

from model.config import ModelConfig
from train.plan.compiled.flops import count_flops
from train.plan.compiled.trip_counts import read_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs TPU's compiler: pip install libtpu",
    ),
]

T = 2048
COMMON = [
    "optimizer=adamw",
    f"data.sequence_length={T}",
    "model.num_layers=2",
    "model.vocab_size=512",
    "model.num_heads=4",
]
GPT2 = ["model=gpt2_124m", "model.embed_dim=256", "model.max_sequence_length=null"]
LLAMA = ["model=llama3_1b", "model.embed_dim=512", "model.num_kv_heads=2"]
LLAMA += ["model.mlp_dim=768", "mesh=fsdp_tensor", "data.batch_size=4"]
STEPS = {  # Head dims are 64 and 128, with 4 and 2 key/value heads.
    "gpt2": [*GPT2, "mesh=fsdp", "data.batch_size=8"],
    "llama": LLAMA,
    "llama_xla": [*LLAMA, "model.attention=xla"],
}
INT8 = [*LLAMA, "mesh=fsdp", "data.batch_size=8", "model.compute_dtype=int8"]
CHIPS = {"v5e": "v5e-8", "v5p": "v5p-8", "v6e": "v6e-8"}
KERNELS = [(chip, 4096, head_dim) for chip in CHIPS for head_dim in (64, 128)]
# The last item is the number of steps.
SCATTERS = [("v5e-8", [50304, 768], 1), ("v5e-64", [128256, 2048], 2)]
PARTS = {"splash_mha_fwd", "splash_mha_dkv", "splash_mha_dq"}


@pytest.fixture(scope="module")
def compiled(compile_cases):
    steps = {
        name: {
            "target": CHIPS["v5e"],
            "step": [*COMMON, *overrides],
        }
        for name, overrides in STEPS.items()
    }
    kernels = {
        f"{chip}_{length}_{head_dim}": {
            "target": CHIPS[chip],
            "attention": [length, head_dim],
        }
        for chip, length, head_dim in KERNELS
    }
    int8 = {
        f"{chip}_int8": {"target": target, "step": [*COMMON, *INT8]}
        for chip, target in CHIPS.items()
    }
    precise = ["model.num_layers=6", "model.high_precision_layers=[first,last]"]
    int8["precise"] = {
        "target": CHIPS["v5e"],
        "step": [*COMMON, *INT8, *precise],
    }
    grouped = {
        f"{chip}_grouped": {"target": target, "grouped": [8192, 8, 2048, 768]}
        for chip, target in CHIPS.items()
    }
    scatters = {
        f"scatter_{target}": {"target": target, "scatter": table}
        for target, table, _ in SCATTERS
    }
    return compile_cases(steps | kernels | int8 | grouped | scatters)


def splash_calls(text: str) -> set[str]:
    """Return the splash kernels that a program calls."""
    calls = [line for line in text.splitlines() if '"tpu_custom_call"' in line]
    return {part for part in PARTS for line in calls if part in line.split("=")[0]}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_step_runs_splash_forward_and_backward_and_holds_no_scores(compiled, name):
    result = compiled[name]
    assert result.error is None
    assert splash_calls(result.text) == PARTS
    assert result.square_buffers(T) == set()


def test_the_checks_see_the_difference_to_xla_attention(compiled):
    result = compiled["llama_xla"]
    assert result.error is None
    assert splash_calls(result.text) == set()
    assert result.square_buffers(T)
    assert compiled["llama"].memory["temp"] < result.memory["temp"] / 3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_products_have_bfloat16_operands(compiled, name):
    products = compiled[name].products()
    assert len(products) > 10
    assert {(a, b) for a, b, _ in products} == {("bf16", "bf16")}


@pytest.mark.parametrize(("chip", "length", "head_dim"), KERNELS)
def test_splash_fits_into_vector_memory(compiled, chip, length, head_dim):
    result = compiled[f"{chip}_{length}_{head_dim}"]
    assert result.error is None
    assert splash_calls(result.text) == PARTS


@pytest.mark.parametrize("chip", CHIPS)
def test_rows_are_multiplied_only_by_the_matrix_of_their_expert(compiled, chip):
    """Three kernels run: forward and both gradients. None is XLA's over all experts."""
    result = compiled[f"{chip}_grouped"]
    assert result.error is None
    assert result.text.count('custom_call_target="tpu_custom_call"') == 3
    assert result.products() == []


@pytest.mark.parametrize("chip", CHIPS)
def test_linear_layers_multiply_int8_except_for_weight_gradients(compiled, chip):
    result = compiled[f"{chip}_int8"]
    assert result.error is None
    weights = 7
    counts = Counter(result.of_linear_layers())
    assert counts == {("s8", "s8"): 2 * weights, ("bf16", "bf16"): weights}
    flops = count_flops(read_module(result.text).executed)
    rows = 2 if chip == "v5p" else 1  # These are per device. v5p-8 has four.
    head = 6 * 512 * 512 * T * rows
    assert flops.eight_bits == pytest.approx(2 / 3 * (flops.products - head))
    gathered_dtypes = re.findall(
        r"= \(?(\w+)\[\d+,[\d,]+\][^=\n]* all-gather", result.text
    )
    assert gathered_dtypes.count("s8") >= 2 * weights


def test_layers_that_keep_their_precision_multiply_bfloat16(compiled):
    """Branches count as often as they are taken: four of six layers multiply int8."""
    result = compiled["precise"]
    weights = 7
    assert result.error is None
    counts = Counter(result.of_linear_layers())
    assert counts == {("s8", "s8"): 2 * weights, ("bf16", "bf16"): 4 * weights}
    model = ModelConfig(num_layers=6, high_precision_layers=("first", "last"))
    flops = count_flops(read_module(result.text, model).executed)
    layers = flops.products - 6 * 512 * 512 * T
    assert flops.eight_bits == pytest.approx(2 / 3 * 4 / 6 * layers)


@pytest.mark.parametrize(("target", "table", "steps"), SCATTERS)
def test_a_tables_gradient_is_scattered_in_every_step(compiled, target, table, steps):
    """The table's columns lie along lanes, which XLA:TPU does not scatter."""
    result = compiled[f"scatter_{target}"]
    assert result.error is None
    assert len(re.findall(r" reduce-scatter\(", result.text)) == steps
    assert " all-reduce(" not in result.text
