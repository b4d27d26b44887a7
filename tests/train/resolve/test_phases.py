"""A run whose batches change their shape can be stopped and continued."""

import re
import signal
from pathlib import Path

import pytest

from data.phases import Phase, phases_of
from tests.train import command_runs
from tests.train.command_runs import RunCommand, steps
from train.errors import ConfigError
from train.resolve.phases import phase_programs
from train.resolve.program import ConfiguredProgram, make_program
from train.run.metrics import read_events

# Fixtures.
folder = command_runs.folder
run_command = command_runs.run_command

GROWING = (
    "data.batch_schedule=[{from_step: 6, rows: 12}, {from_tokens: 3000, rows: 16}]",
    "data.sequence_schedule=[{from_step: 0, length: 16}, {from_step: 4, length: 32}]",
    *("schedule.batch_rule=sqrt", "train.num_steps=14", "schedule=constant"),
)


@pytest.mark.slow
def test_a_growing_batch_continues_on_another_mesh_after_a_preemption(
    folder: Path, run_command: RunCommand
):
    """Four steps have 128 tokens, two 256, six 384, and those from batch 12 on 512."""
    straight = folder / "straight"
    stopped = folder / "stopped"
    result = run_command(straight, GROWING)
    assert result.returncode == 0, result.stderr
    assert "16 rows x 32 = 512 tokens from batch 12 on" in result.stdout
    phases = [e for e in read_events(straight) if e["event"] == "phase"]
    keys = ("step", "rows", "length")
    assert [tuple(e[key] for key in keys) for e in phases] == [
        (5, 8, 32),
        (7, 12, 32),
        (13, 16, 32),
    ]
    rates = [line["learning_rate"] / 1e-3 for line in steps(straight)]
    assert rates[3:12:2] == pytest.approx([0.5**0.5, 1, *[1.5**0.5] * 3], rel=1e-6)

    preempted = run_command(stopped, GROWING, at_step=8, signal_number=signal.SIGTERM)
    assert preempted.returncode == 42, preempted.stderr
    result = run_command(stopped, [*GROWING, "mesh=ddp"])
    assert result.returncode == 0, result.stderr
    assert re.search(r"from step (8|9|1\d)\n", result.stdout)
    for a, b in zip(steps(straight), steps(stopped), strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-5), a["step"]


def phases_on(program: ConfiguredProgram) -> dict[Phase, ConfiguredProgram]:
    devices = list(program.mesh.devices.flat)
    return phase_programs(program, lambda config: make_program(config, devices))


def test_microbatches_of_all_phases_keep_the_token_limit(programs):
    program = programs(
        [
            "data.batch_size=8",
            "data.sequence_length=32",
            "train.accumulation_steps=2",
            "data.batch_schedule=[{from_step: 2, rows: 12}, {from_step: 4, rows: 14}]",
            "data.sequence_schedule=[{from_step: 0, length: 8}, "
            "{from_step: 6, length: 32}]",
        ]
    )
    phases = phases_on(program)
    assert tuple(phases) == phases_of(program.config.data)
    # The limit is 4 x 32 tokens. 8 x 8, 12 x 8 and 14 x 8 fit in one; 14 = 7 x 2 rows.
    counts = [p.config.train.accumulation_steps for p in phases.values()]
    assert counts == [1, 1, 1, 7]


def test_a_phase_that_devices_cannot_share_is_a_mistake(programs):
    changes = "data.batch_schedule=[{from_step: 2, rows: 7}]"
    program = programs(["mesh.data=2", "data.batch_size=8", changes], devices=2)
    with pytest.raises(ConfigError) as error:
        phases_on(program)
    (mistake,) = error.value.mistakes
    assert (mistake.key, mistake.value) == ("data.batch_schedule", 7)


def test_a_warm_up_in_tokens_ends_at_the_same_step_in_all_phases(programs):
    program = programs(
        [
            "schedule.warmup_tokens=1000",
            "data.batch_size=8",
            "data.batch_schedule=[{from_step: 2, rows: 12}, {from_step: 3, rows: 16}]",
        ]
    )
    configs = [program.config, *(p.config for p in phases_on(program).values())]
    ends = [config.schedule.in_steps(config.data).warmup_steps for config in configs]
    assert ends == [4] * 4  # They have 256 + 256 + 384 + 512 tokens.
