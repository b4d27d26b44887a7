"""Training steps compiled for machines that are not there, through the door."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.train.pages import data_of, drawn
from train.hardware.devices import fake_devices, missing_compiler
from train.hardware.targets import parse_target
from train.plan.aot import OutOfMemory, compile_step, out_of_memory
from train.plan.budget import memory_budget
from train.plan.memory import device_memory
from train.program import make_program

NO_LIBTPU = missing_compiler(parse_target("v5e-8"))
NO_PLUGIN = missing_compiler(parse_target("h100-8"))
tpu = [
    pytest.mark.tpu,
    pytest.mark.skipif(NO_LIBTPU is not None, reason=f"{NO_LIBTPU}"),
]
cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(NO_PLUGIN is not None, reason=f"{NO_PLUGIN}"),
]
LONG = ("data.sequence_length=128", "model.compute_dtype=auto", "model.num_layers=1")
SMALL = (*LONG, "model.num_heads=4", "model.embed_dim=32", "optimizer=adamw")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
            "the total memory required for HLO temporaries (20.50G) exceeds "
            "available HBM (15.75G). HLO module: jit_train_step.",
            (41 * 2**29, 63 * 2**28),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
            "memory space hbm. Used 512.00M of 15.75G hbm. Exceeded by ...",
            (2**29, 63 * 2**28),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M "
            "of 16.00M vmem.",
            None,
        ),
        ("INVALID_ARGUMENT: no such thing", None),
    ],
)
def test_the_compilers_words_become_bytes(message, expected):
    error = out_of_memory(message)
    found = error and (error.needed_bytes, error.available_bytes)
    assert found == expected


@pytest.mark.slow
def test_compiled_arguments_are_the_state_and_the_batch(programs):
    program = programs("mesh=fsdp", devices=4)
    ledger = device_memory(program, compile_step(program))
    parts = {name: figure.bytes for name, figure in ledger.parts.items()}
    held = parts["parameters"] + parts["optimizer state"] + parts["batch"]
    assert parts["arguments"] == held
    assert ledger.needed.bytes > held
    assert ledger.needed.how == "compiled"


@pytest.mark.parametrize(
    ("target", "overrides", "kind"),
    [
        pytest.param(
            *("v5e-8", ("mesh=fsdp",), "TPU v5 lite"), marks=[*tpu, pytest.mark.slow]
        ),
        pytest.param(
            "v5p-16x2",
            ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2", "data.batch_size=16"),
            "TPU v5",
            marks=[*tpu, pytest.mark.slow],
        ),
    ],
)
def test_a_step_for_tpus_is_that_of_training(
    configure, planning, target, overrides, kind
):
    machine = parse_target(target)
    program = make_program(configure(*LONG, *overrides), fake_devices(machine))
    compiled = compile_step(program)
    ledger = device_memory(program, compiled)
    assert program.mesh.devices.flat[0].device_kind == kind
    assert program.execution.attention == "splash"
    assert '"tpu_custom_call"' in compiled.as_text()
    assert ("megascale" in compiled.as_text()) == (machine.slices > 1)
    parts = {name: figure.bytes for name, figure in ledger.parts.items()}
    held = parts["parameters"] + parts["optimizer state"] + parts["batch"]
    assert parts["arguments"] >= held  # padded to tiles
    assert parts["outputs"] < 2**14  # the state is written over the old one


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(("model.embed_dim=8192", "model.mlp_dim=65536"), marks=tpu)],
)
def test_too_large_a_step_is_a_verdict_with_figures(configure, planning, overrides):
    target = parse_target("v5e-1")
    config = configure(*LONG, *overrides, "data.batch_size=1")
    program = make_program(config, fake_devices(target))
    with pytest.raises(OutOfMemory) as error:
        compile_step(program)
    parts = device_memory(program, error.value).parts
    assert error.value.available_bytes == memory_budget(target.chip, 0.0).program
    assert error.value.needed_bytes > parts["parameters"].bytes * 3


@pytest.fixture
def plan(forks: Forks, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Run `python -m train.plan`; give what it said, on both streams."""

    def plan(*overrides: str, code: int = 0) -> tuple[str, str]:
        done = forks.run(["-m", "train.plan", *SMALL, *overrides], tmp_path)
        assert done.returncode == code, done.stderr[-4000:]
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    return plan


@pytest.mark.parametrize(
    ("target", "attention", "code"),
    [
        ("cpu", "xla", 4),
        pytest.param("v5e-8", "splash", 0, marks=tpu),
        pytest.param("h100-4x2", "cudnn", 0, marks=cuda),
    ],
)
def test_the_door_prints_one_json_object(plan, target, attention, code):
    small = ["mesh=ddp", "data.batch_size=8", "runtime.cpu_devices=2"]
    margin = "margin=0.99999999" if code else "margin=0.05"
    out, _ = plan(f"target={target}", *small, margin, "json=true", code=code)
    said = json.loads(out)
    assert said["target"] == target
    assert said["attention"] == attention
    assert said["fits"] is (code == 0)
    assert said["fits"] == (said["needed"]["bytes"] <= said["memory"]["available"])
    assert said["per_device"]["parameters"]["how"] == "computed"
    assert said["per_device"]["arguments"]["how"] == "compiled"
    assert said["compile"]["peak_rss_bytes"] > 2**20


def test_a_wrong_target_is_listed_with_all_that_is_wrong(plan):
    _, err = plan("target=v5e-7", "margin=2", code=78)
    assert "v5e-4 and v5e-8" in err
    assert "margin = 2" in err


def test_what_does_not_fit_data_devices_and_model_is_listed_at_once(plan):
    sizes = "runtime.cpu_devices=8", "mesh.fsdp=3", "data.batch_size=8"
    wrong = "model.vocab_size=100", "plan.array=norm"
    _, err = plan(*sizes, *wrong, code=78)
    keys = ("mesh", "data.batch_size", "mesh.params.embed", "model.vocab_size")
    assert err.startswith("5 mistakes") or "\n5 mistakes" in err
    for key in (*keys, "plan.array"):
        assert f"\n  {key} = " in err


def test_the_array_asked_for_is_in_the_json(plan):
    out, _ = plan("json=true", "runtime.cpu_devices=4", "plan.array=norm.scale")
    array = json.loads(out)["array"]
    assert array["name"] == "norm.scale"
    assert len(array["held"]) == 4


@pytest.mark.skipif(NO_PLUGIN is None, reason="it is there")
def test_without_the_compiler_it_is_estimated(plan, tmp_path):
    small = "mesh=fsdp", "data.batch_size=8", f"output={tmp_path}"
    out, err = plan("target=h100-8", *small, code=0)
    assert "pip install -e '.[plan-gpu]'" in err
    assert "a device, estimated" in out
    assert "fits        yes" in out
    assert "MFU" in out
    saved = json.loads((tmp_path / "plan.json").read_text())
    html = (tmp_path / "plan.html").read_text()
    assert saved["fits"]
    assert data_of(html) == saved
    assert f"parameters on {saved['target']}" in drawn(html).text
