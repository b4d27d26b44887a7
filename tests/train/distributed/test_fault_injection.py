"""Faults are injected only if the config allows it, and never silently."""

from typing import Any

import pytest

from train.cli.command import compose
from train.distributed.fault_injection import FaultInjection
from train.identity import run_name

NOTHING: Any = None


@pytest.fixture
def fault(monkeypatch) -> None:
    monkeypatch.setenv("LONGHAUL_DRILL", "crash:0:7")


def test_a_run_that_is_no_drill_ignores_the_variable_and_says_so(fault, caplog):
    faults = FaultInjection(0, compose([]).runtime.allow_fault_injection)
    assert faults.after(7, NOTHING, NOTHING) is NOTHING
    assert "LONGHAUL_DRILL=crash:0:7 has no effect" in caplog.text
    assert "runtime.allow_fault_injection=true" in caplog.text


def test_a_drill_begins_with_a_banner(fault, caplog):
    drill = compose(["runtime.allow_fault_injection=true"])
    faults = FaultInjection(0, drill.runtime.allow_fault_injection)
    assert "FAULT INJECTION: this run is a drill" in caplog.text
    with pytest.raises(RuntimeError, match="LONGHAUL_DRILL"):
        faults.after(7, NOTHING, NOTHING)
    assert run_name(drill) == run_name(compose([]))
