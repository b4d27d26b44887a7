"""Training steps are compiled for absent machines, also by `python -m train.plan`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.program import module_option
from tests.train.pages import data_of, drawn
from train.hardware.devices import fake_devices, missing_compiler
from train.hardware.targets import parse_target
from train.plan.aot import OutOfMemory, compile_step, lower_step, out_of_memory
from train.plan.budget import memory_budget
from train.plan.memory import device_memory
from train.resolve.program import make_program

NO_LIBTPU = missing_compiler(parse_target("v5e-8"))
NO_PLUGIN = missing_compiler(parse_target("h100-8"))
tpu = [pytest.mark.tpu, pytest.mark.skipif(bool(NO_LIBTPU), reason=f"{NO_LIBTPU}")]
cuda = [pytest.mark.cuda, pytest.mark.skipif(bool(NO_PLUGIN), reason=f"{NO_PLUGIN}")]
LONG = ("data.sequence_length=128", "model.compute_dtype=auto", "model.num_layers=1")
SMALL = (*LONG, "model.num_heads=4", "model.embed_dim=32", "optimizer=adamw")


def test_the_compilers_message_becomes_bytes():
    error = out_of_memory(
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
        "the total memory required for HLO temporaries (20.50G) exceeds "
        "available HBM (15.75G). HLO module: jit_train_step."
    )
    assert error is not None
    assert (error.needed_bytes, error.available_bytes) == (41 * 2**29, 63 * 2**28)
    assert out_of_memory("Ran out of memory in memory space vmem.") is None


def held_bytes(parts) -> int:
    return sum(parts[k].bytes for k in ("parameters", "optimizer state", "batch"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "overrides"),
    [("v5e-8", []), ("v5p-16x2", ["mesh.dcn.data=2", "mesh.data=2"])],
    ids=str,
)
@pytest.mark.tpu
@pytest.mark.skipif(bool(NO_LIBTPU), reason=f"{NO_LIBTPU}")
def test_a_step_for_tpus_is_the_training_step(configure, planning, target, overrides):
    machine = parse_target(target)
    config = configure([*LONG, "mesh=fsdp", *overrides, "data.batch_size=16"])
    program = make_program(config, fake_devices(machine))
    compiled = compile_step(program)
    parts = device_memory(program, compiled).parts
    assert program.execution.attention.kernel == "splash"
    assert '"tpu_custom_call"' in compiled.as_text()
    assert ("megascale" in compiled.as_text()) == (machine.slices > 1)
    assert parts["arguments"].bytes >= held_bytes(parts)  # They are padded to tiles.
    assert parts["outputs"].bytes < 2**14  # The new state overwrites the old.


@pytest.mark.tpu
@pytest.mark.skipif(bool(NO_LIBTPU), reason=f"{NO_LIBTPU}")
def test_a_step_that_is_too_large_ends_with_figures(configure, planning):
    target = parse_target("v5e-1")
    mlp = "model.mlp_dim=65536"
    config = configure([*LONG, "model.embed_dim=8192", mlp, "data.batch_size=1"])
    program = make_program(config, fake_devices(target))
    with pytest.raises(OutOfMemory) as error:
        compile_step(program)
    parts = device_memory(program, error.value).parts
    assert error.value.available_bytes == memory_budget(target.chip, 0.0).program
    assert error.value.needed_bytes > parts["parameters"].bytes * 3


@pytest.fixture
def plan(forks: Forks, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Run `python -m train.plan` and return its stdout and stderr."""

    def plan(overrides: list[str], code: int = 0) -> tuple[str, str]:
        result = forks.run([*module_option("train.plan"), *SMALL, *overrides], tmp_path)
        assert result.returncode == code, result.stderr[-4000:]
        assert "Traceback" not in result.stderr
        return result.stdout, result.stderr

    return plan


@pytest.mark.parametrize(
    ("target", "attention", "code"),
    [
        pytest.param("cpu", "xla", 4, marks=pytest.mark.slow),
        pytest.param("v5e-8", "splash", 0, marks=tpu),
        pytest.param("h100-4x2", "cudnn", 0, marks=cuda),
    ],
)
def test_a_compiled_plan_is_one_json_object(plan, target, attention, code):
    overrides = ["mesh=ddp", "data.batch_size=8", "runtime.cpu_devices=2"]
    margin = "margin=0.99999999" if code else "margin=0.05"
    options = (margin, "json=true", "plan.array=norm.scale")
    out, _ = plan([f"target={target}", *overrides, *options], code=code)
    values = json.loads(out)
    assert values["target"] == target
    assert values["attention"] == attention
    assert values["fits"] is (code == 0)
    assert values["per_device"]["parameters"]["how"] == "computed"
    assert values["per_device"]["arguments"]["how"] == "compiled"
    assert values["compile"]["peak_rss_bytes"] > 2**20
    assert values["array"]["name"] == "norm.scale"
    assert len(values["array"]["held"]) == values["devices"]


@pytest.mark.cuda
@pytest.mark.skipif(bool(NO_PLUGIN), reason=f"{NO_PLUGIN}")
def test_an_absent_hopper_runs_cudnn_with_a_large_head_dim(configure, planning):
    head = ("model.num_heads=1", "model.head_dim=192")
    config = configure([*LONG, *head, "mesh=ddp", "data.batch_size=1"])
    program = make_program(config, fake_devices(parse_target("h100-1")))
    assert program.execution.attention.kernel == "cudnn"
    assert "__cudnn$fmha" in lower_step(program)[1].as_text()


def test_all_mistakes_are_listed_at_once(plan):
    overrides = "runtime.cpu_devices=8", "mesh.fsdp=3", "model.vocab_size=100"
    _, err = plan([*overrides, "data.batch_size=8"], code=78)
    assert "4 mistakes" in err
    for key in ("mesh", "data.batch_size", "mesh.params.embed", "model.vocab_size"):
        assert f"\n  {key} = " in err


@pytest.mark.skipif(NO_PLUGIN is None, reason="the compiler is installed")
def test_without_the_compiler_a_step_is_estimated(plan, tmp_path):
    overrides = "mesh=fsdp", "data.batch_size=8", f"output={tmp_path}"
    out, err = plan(["target=h100-8", *overrides])
    assert "pip install -e '.[plan-gpu]'" in err
    assert "fits        not known" in out
    assert "MFU" in out
    values = json.loads((tmp_path / "plan.json").read_text())
    html = (tmp_path / "plan.html").read_text()
    assert values["fits"]
    assert data_of(html) == values
    assert f"parameters on {values['target']}" in drawn(html).text
