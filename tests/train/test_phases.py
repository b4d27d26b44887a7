"""A run whose batches change their shape, stopped and continued."""

import signal
from pathlib import Path

import pytest

from data.phases import Phase, phases_of
from tests.train import doors
from tests.train.doors import Door, steps
from train.errors import ConfigError
from train.phases import phase_programs
from train.program import Program, make_program
from train.run.metrics import read_events

folder, door = doors.folder, doors.door  # fixtures

GROWING = (
    "data.batch_schedule=[{from_step: 6, rows: 12}, {from_tokens: 3000, rows: 16}]",
    "data.sequence_schedule=[{from_step: 0, length: 16}, {from_step: 4, length: 32}]",
    *("schedule.batch_rule=sqrt", "train.num_steps=14", "schedule=constant"),
)


def test_a_growing_batch_goes_on_through_a_kill_on_another_mesh(
    folder: Path, door: Door
):
    """4 x 128, 2 x 256 and 6 x 384 tokens, then 512 a step from batch 12 on."""
    straight, killed = folder / "straight", folder / "killed"
    result = door(straight, *GROWING)
    assert result.returncode == 0, result.stderr
    assert "16 rows x 32 = 512 tokens from batch 12 on" in result.stdout
    found = [e for e in read_events(straight) if e["event"] == "phase"]
    keys = ("step", "rows", "length")
    assert [tuple(e[key] for key in keys) for e in found] == [
        (5, 8, 32),
        (7, 12, 32),
        (13, 16, 32),
    ]
    rates = [line["learning_rate"] / 1e-3 for line in steps(straight)]
    assert rates[3:12:2] == pytest.approx([0.5**0.5, 1, *[1.5**0.5] * 3], rel=1e-6)

    died = door(killed, *GROWING, at_step=9, number=signal.SIGKILL)
    assert died.returncode == -signal.SIGKILL
    result = door(killed, *GROWING, "mesh=ddp")
    assert result.returncode == 0, result.stderr
    assert "from step 5\n" in result.stdout
    for a, b in zip(steps(straight), steps(killed), strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-5), a["step"]


def phases_on(program: Program) -> dict[Phase, Program]:
    devices = list(program.mesh.devices.flat)
    return phase_programs(program, lambda config, _: make_program(config, devices))


def test_microbatches_of_a_phase_have_at_most_as_many_tokens(programs):
    program = programs(
        *("data.batch_size=8", "data.sequence_length=32", "train.accumulation_steps=2"),
        "data.batch_schedule=[{from_step: 2, rows: 12}, {from_step: 4, rows: 14}]",
        "data.sequence_schedule=[{from_step: 0, length: 8}, "
        "{from_step: 6, length: 32}]",
    )
    found = phases_on(program)
    assert tuple(found) == phases_of(program.config.data)
    # 4 x 32 tokens at most: 8 x 8, 12 x 8 and 14 x 8 fit in one; 14 = 7 x 2 rows.
    counts = [p.config.train.accumulation_steps for p in found.values()]
    assert counts == [1, 1, 1, 7]


def test_a_phase_that_devices_cannot_share_is_a_mistake(programs):
    changes = "data.batch_schedule=[{from_step: 2, rows: 7}]"
    program = programs("mesh.data=2", "data.batch_size=8", changes, devices=2)
    with pytest.raises(ConfigError) as error:
        phases_on(program)
    (mistake,) = error.value.mistakes
    assert (mistake.key, mistake.value) == ("data.batch_schedule", 7)
