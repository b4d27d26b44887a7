"""The training step for eight H100s is compiled on the CPU, and then inspected.

    pip install 'jax[cuda13]'
    python -m pytest tests/kernels/test_cuda.py

No GPU and no driver is needed: train/hardware/devices.py describes the machine.
"""

import importlib.util
import math
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig
from tests.program import program_code
from train.plan.compiled.collectives import list_collectives
from train.plan.compiled.flops import count_flops, has_eight_bits, is_kernel
from train.plan.compiled.inspection import inspect
from train.plan.compiled.trip_counts import read_module

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not any(
            importlib.util.find_spec(f"jax_cuda{version}_plugin")
            for version in (12, 13)
        ),
        reason="needs NVIDIA's compiler: pip install 'jax[cuda13]'",
    ),
]

T = 1024
# Each GPU has these rows and heads without tensor parallelism.
ROWS = 2
HEADS = 4
COMMON = [
    "optimizer=adamw",
    f"data.sequence_length={T}",
    "model.num_layers=2",
    "model.vocab_size=512",
    f"model.num_heads={HEADS}",
]
GPT2 = ["model=gpt2_124m", "model.embed_dim=256", "model.mlp_dim=768"]
GPT2 += ["model.max_sequence_length=null", "mesh=fsdp", f"data.batch_size={8 * ROWS}"]
LLAMA = ["model=llama3_1b", "model.embed_dim=512", "model.mlp_dim=768"]
LLAMA += ["model.num_kv_heads=2", "mesh=fsdp_tensor", f"data.batch_size={4 * ROWS}"]
LLAMA += ["model.window=300", "model.layer_pattern=[local,global]"]
LATENT = ["model=deepseek_v2_lite", "model.mlp=dense", "model.dense_layers=0"]
LATENT += ["model.shared_experts=0", "model.embed_dim=256", "model.mlp_dim=768"]
LATENT += ["mesh=fsdp", f"data.batch_size={8 * ROWS}"]
STEPS = {  # Head dims are 64 and 128, with 4 and 2 key/value heads.
    "gpt2": GPT2,
    "gpt2_unmasked": [*GPT2, "data.document_mask=false"],
    "gpt2_xla": [*GPT2, "model.attention=xla"],
    "llama": LLAMA,
    "llama_sinks": [*LLAMA, "model.attention_sinks=true"],
    "latent": LATENT,
    "gpt2_packed": [*GPT2, "model.attention=cudnn_packed"],
    "llama_packed": [*LLAMA, "model.attention=cudnn_packed", "train.remat=[attention]"],
    "gpt2_full": [*GPT2, "train.remat=full"],
    "gpt2_kept": [*GPT2, "train.remat=[attention]"],
}
FLOAT8 = [*LLAMA, "model.mlp_dim=1024", "model.compute_dtype=float8"]
PRECISE = [*FLOAT8, "model.num_layers=6", "model.high_precision_layers=[first]"]
EIGHT_BITS = {  # XLA multiplies these with Triton or with cuBLAS.
    "float8": {"step": [*COMMON, *FLOAT8]},
    "float8_fsdp": {"step": [*COMMON, *FLOAT8, "mesh=fsdp", "data.batch_size=16"]},
    "float8_cublas": {
        "step": [*COMMON, *FLOAT8],
        "options": {"xla_gpu_enable_triton_gemm": False},
    },
    "float8_precise": {"step": [*COMMON, *PRECISE]},
    "float8_grouped": {"grouped": [8192, 8, 1024, 2048], "dtype": "float8"},
}
CUBLAS = "__cublas$lt$matmul", "__cublas$lt$matmul$f8"
PLAIN = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
MASKED = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}


@pytest.fixture(scope="module")
def compiled(compile_cases):
    steps = {
        name: {"target": "h100-8", "step": [*COMMON, *step]}
        for name, step in STEPS.items()
    }
    grouped = {"target": "h100-8", "grouped": [8192, 8, 1024, 2048]}
    eight_bits = {name: {"target": "h100-8", **EIGHT_BITS[name]} for name in EIGHT_BITS}
    return compile_cases({**steps, **eight_bits, "grouped": grouped})


def cudnn_calls(text: str) -> list[str]:
    return [
        line for line in text.splitlines() if 'custom_call_target="__cudnn$' in line
    ]


def targets(text: str) -> set[str]:
    return {
        line.split('custom_call_target="')[1].split('"')[0]
        for line in cudnn_calls(text)
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", MASKED),
        ("llama", MASKED),
        ("llama_sinks", MASKED),
        ("gpt2_unmasked", PLAIN),
    ],
)
def test_a_step_runs_cudnn_forward_and_backward(compiled, name, expected):
    result = compiled[name]
    assert result.error is None
    assert targets(result.text) == expected
    for call in cudnn_calls(result.text):
        # A causal kernel skips the blocks above the diagonal.
        assert '"mask_type": "CAUSAL"' in call


def test_local_layers_have_kernels_of_their_own_forward_and_backward(compiled):
    kernels = {
        (re.search(r'"sliding_window_length": ?(\d+)', call)[1], target)
        for call in cudnn_calls(compiled["llama"].text)
        for target in targets(call)
    }
    assert kernels == {(window, target) for window in ("0", "300") for target in MASKED}


@pytest.mark.parametrize(
    ("name", "forward"), [("gpt2", 1), ("gpt2_full", 2), ("gpt2_kept", 1)]
)
def test_cudnn_runs_forward_once_where_its_results_are_kept(compiled, name, forward):
    layers = 2
    kernels = inspect(compiled[name].text, []).kernels
    assert {kernel: n for kernel, n in kernels.items() if "fmha" in kernel} == {
        "__cudnn$fmhaScaleBiasSoftmax": forward * layers,
        "__cudnn$fmhaScaleBiasSoftmaxBackward": layers,
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_sinks", "latent"])
def test_no_kernel_returns_the_gradient_of_a_mask(compiled, name):
    calls = cudnn_calls(compiled[name].text)
    assert any("Backward" in call for call in calls)
    for call in calls:
        assert f"[{ROWS},1,{T},{T}]" not in call.split(" custom-call(")[0]


def test_values_of_128_dims_are_not_padded_to_the_192_of_keys(compiled):
    """A backward pass for values of 192 dims would not run on Blackwell."""
    result = compiled["latent"]
    assert result.error is None
    assert targets(result.text) == MASKED
    keys, values = (f"bf16[{ROWS},{T},{HEADS},{H}]" for H in (192, 128))
    for call in cudnn_calls(result.text):
        layouts = call.split("operand_layout_constraints={")[1]
        assert re.findall(r"bf16\[[\d,]+\]", layouts)[:3] == [keys, keys, values]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_documents_need_a_mask_of_one_head_and_no_scores(compiled, name):
    buffers = compiled[name].square_buffers(T)
    assert (ROWS, 1, T, T) in buffers
    expected = {(ROWS,), (1, ROWS), (ROWS, 1), (), (1,), (1, 1)}
    if name == "llama":  # A layer chooses its kernel and saves its mask (docs/log).
        expected |= {(layers, ROWS, 1) for layers in (1, 2)}
    assert {shape[:-2] for shape in buffers} <= expected


def test_rows_are_multiplied_only_by_the_matrix_of_their_expert(compiled):
    """Three kernels run: forward and both gradients. XLA's would expand the rows."""
    result = compiled["grouped"]
    assert result.error is None
    assert result.text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert result.products() == []
    # The cotangent and the weight are rounded to bfloat16.
    rounded_bytes = 2 * (8192 * 2048 + 8 * 1024 * 2048)
    assert result.memory["temp"] < 1.1 * rounded_bytes


@pytest.mark.parametrize("name", ["gpt2_packed", "llama_packed"])
def test_document_offsets_need_no_mask(compiled, name):
    """Each pass runs one loop, whatever the number of documents in a row."""
    result = compiled[name]
    assert result.error is None
    assert targets(result.text) == PLAIN
    assert result.square_buffers(T) == set()
    calls = cudnn_calls(result.text)
    for call in calls:
        assert '"mask_type": "PADDING_CAUSAL"' in call
        assert re.search(r'"max_seg_per_batch": ?2\D', call)
    forward = [call for call in calls if "Backward" not in call]
    # No forward kernel runs again. XLA may move one turn out of the backward loop.
    assert len(forward) in (len(calls) / 2, len(calls) / 3)
    assert result.memory["temp"] < compiled[name.split("_")[0]].memory["temp"]


def test_rows_of_one_document_need_no_mask(compiled):
    assert compiled["gpt2_unmasked"].square_buffers(T) == set()


def test_the_checks_see_the_difference_to_xla_attention(compiled):
    result = compiled["gpt2_xla"]
    assert result.error is None
    assert targets(result.text) == set()
    scores = rf"bf16\[[\d,]*{HEADS},\d+,{T}\]"  # of some of the queries
    assert re.search(scores, result.text)
    assert not re.search(scores, compiled["gpt2"].text)
    assert compiled["gpt2"].memory["temp"] < 0.6 * result.memory["temp"]


@pytest.mark.parametrize("name", STEPS)
def test_products_have_bfloat16_operands(compiled, name):
    """A float32 cotangent would drop the backward pass to TF32, at half the speed."""
    products = compiled[name].products()
    assert len(products) > 10
    assert {(a, b) for a, b, _ in products} == {("bf16", "bf16")}


def test_the_traffic_and_compute_of_eight_gpus_are_read(compiled):
    """Layers gather rounded weights and scatter rounded gradients over NVLink."""
    gpu = SimpleNamespace(platform="gpu", process_index=0, device_kind="")
    devices = np.array([gpu] * 8)
    mesh: Any = SimpleNamespace(
        axis_names=("fsdp",), shape={"fsdp": 8}, devices=devices
    )
    module = read_module(compiled["gpt2"].text)
    assert module.unread == []
    matrices = 2 * (4 * 256 * 256 + 2 * 256 * 768)  # Both layers are counted.
    tables = 4 * (512 + T) * 256  # The lookups gather these.
    head = 2 * 512 * 256  # The loss gathers this.
    collectives = list_collectives(module, mesh)
    for kind, passes in (("all-gather", 2), ("reduce-scatter", 1)):
        matches = [c for c in collectives if c.kind == kind]
        payload = sum(c.count * c.payload for c in matches)
        size = passes * 2 * matrices + tables + head
        assert payload == pytest.approx(size, rel=0.01)  # Vectors add little.
        assert {c.group.network for c in matches} == {"NVLink"}
    flops = count_flops(module.executed)
    assert flops.products == 6 * (matrices + 512 * 256) * ROWS * T
    assert flops.unknown == ()


def test_all_branches_are_read(compiled):
    """The trips of a loop over documents depend on the data."""
    for name, result in compiled.items():
        if result.error is None:
            unread = read_module(result.text).unread
            assert [line for line in unread if "trip count" not in line] == [], name


@pytest.mark.parametrize("name", ["float8", "float8_fsdp"])
def test_linear_layers_multiply_float8_and_the_head_bfloat16(compiled, name):
    """All three products of a layer are float8, none bfloat16 after a conversion."""
    result = compiled[name]
    assert result.error is None
    pairs = [("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2"), ("f8e5m2", "f8e4m3fn")]
    assert {*result.of_linear_layers()} == {*pairs}
    assert ("bf16", "bf16") in {(a, b) for a, b, _ in result.products()}
    flops = count_flops(read_module(result.text).executed)
    head = 512 * 512
    mlp_matrix = 512 * 1024
    # Both layers are counted.
    matrices = 2 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * mlp_matrix)
    assert flops.eight_bits * head == (flops.products - flops.eight_bits) * matrices


def test_weights_travel_in_float8(compiled):
    """Layers gather float8 matrices in both passes. The head alone uses bfloat16."""
    lines = compiled["float8_fsdp"].text.splitlines()
    gathers = "".join(line for line in lines if " all-gather-done(" in line)
    assert gathers.count("f8e4m3fn[") >= 2 * 7
    assert gathers.count("bf16[") == 1


def test_cublas_multiplies_float8_where_triton_does_not(compiled):
    text = compiled["float8_cublas"].text
    counts = {kind: text.count(f'custom_call_target="{kind}"') for kind in CUBLAS}
    assert counts[CUBLAS[0]] == 3  # The head has three.
    flops = count_flops(read_module(text).executed)
    assert counts[CUBLAS[1]] >= 7 * 3
    assert flops == count_flops(read_module(compiled["float8"].text).executed)


def test_layers_that_keep_their_precision_multiply_bfloat16(compiled):
    """Branches count as often as they are taken: five of six layers multiply float8."""
    result = compiled["float8_precise"]
    assert result.error is None
    pairs = [("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2"), ("f8e5m2", "f8e4m3fn")]
    assert {*result.of_linear_layers()} == {*pairs, ("bf16", "bf16")}
    model = ModelConfig(
        num_layers=6,
        window=300,
        layer_pattern=("local", "global"),
        high_precision_layers=("first",),
    )
    flops = count_flops(read_module(result.text, model).executed)
    head = 512 * 512
    mlp_matrix = 512 * 1024
    matrices = 2 * 512 * 512 + 2 * 512 * 256 + 3 * mlp_matrix  # One layer is counted.
    assert flops.eight_bits * (head + matrices) == (
        (flops.products - flops.eight_bits) * 5 * matrices
    )


def test_experts_multiply_float8(compiled):
    result = compiled["float8_grouped"]
    assert result.error is None
    assert result.text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    executed = read_module(result.text).executed
    inner = (i for entry in executed for i in entry.instruction.with_nested)
    assert all(map(has_eight_bits, filter(is_kernel, inner)))


GRADIENT = """
import sys
from train.config import Platform, RuntimeConfig
from train.runtime import set_up
set_up(RuntimeConfig(platform=Platform.cpu, deterministic=sys.argv[1] == "True"))
import jax, jax.numpy as jnp

def two_layers(x):
    for _ in range(2):
        x = jax.nn.dot_product_attention(
            x, x, x, is_causal=True, implementation="cudnn"
        )
    return x.sum()

x = jnp.zeros((2, 128, 4, 64), jnp.bfloat16)
traced = jax.jit(jax.grad(two_layers)).trace(x)
text = traced.lower(lowering_platforms=("cuda",)).as_text()
print(text.count("fmhaSoftmaxBackward"), text.count("force_deterministic"))
"""


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_backward_kernel_is_asked_to_be_deterministic(deterministic):
    """XLA asks only the first of equal calls, and a step crashes at the others."""
    completed = subprocess.run(
        [sys.executable, "-c", program_code(GRADIENT), str(deterministic)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.split() == ["2", "2" if deterministic else "0"]


def test_each_norm_of_a_layer_is_one_kernel_forward_and_one_backward(compiled):
    kernels = re.findall(r'part\.norm/(\w+)_norm/pallas_call"', compiled["gpt2"].text)
    assert {*kernels} == {"forward", "backward"}
    # XLA cannot partition a kernel over `tensor`.
    assert "_norm/pallas_call" not in compiled["llama"].text


def test_the_sum_with_a_bias_is_not_stored(compiled):
    """Of the hidden values of an MLP, the product and the activation are stored."""
    sizes = [
        math.prod(array.dims)
        for entry in read_module(compiled["gpt2"].text).executed
        for array in entry.instruction.arrays
        if entry.instruction.opcode == "fusion"
        and "/jvp(layers)/" in entry.instruction.op_name
        and "part.mlp" in entry.instruction.op_name
    ]
    layers = 2
    assert sizes.count(ROWS * T * 768) == 2 * layers
