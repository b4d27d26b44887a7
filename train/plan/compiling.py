"""Show an estimate before a step is compiled, and what compiling changed.

Compiling takes minutes for large models. So a plan first prints the estimate, then
which machine it compiles for and how long that takes, then what the compiler's figures
change.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from train.console import print_table
from train.plan.plan import Plan
from train.units import format_bytes, format_seconds

_INTERVAL_S = 10.0  # between two lines about a compilation that goes on


def print_estimate(plan: Plan) -> None:
    """Print the memory and the speed of an estimated plan, in two lines."""
    needed = format_bytes(plan.memory.needed.bytes)
    available = format_bytes(plan.budget.available)
    print(f"estimated   at least {needed} a device, available {available}")
    if plan.prediction:
        step = plan.prediction.step_s
        mfu = plan.prediction.range("mfu")
        print(
            f"            {step.low:.3g} to {step.high:.3g} s a step, "
            f"MFU {mfu.low:.0%} to {mfu.high:.0%}"
        )
    sys.stdout.flush()


@contextmanager
def shown_compilation(target: str) -> Iterator[None]:
    """Say on stderr what is compiled, and every ten seconds for how long."""
    start_time = time.monotonic()
    print(f"compiling   the step for {target}", file=sys.stderr)
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_INTERVAL_S):
            seconds = format_seconds(time.monotonic() - start_time)
            print(f"compiling   for {seconds}", file=sys.stderr)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def print_changes(estimate: Plan, compiled: Plan) -> None:
    """Print the figures that compiling changed. Both plans are of the same step."""
    before = _figures(estimate)
    after = _figures(compiled)
    rows = [[name, before[name], after[name]] for name in before]
    print_table(rows, ["", "estimated", "compiled"], "what compiling changed")


def _figures(plan: Plan) -> dict[str, str]:
    step_time = ""
    if plan.fits and plan.prediction:
        step_time = f"{plan.prediction.middle.step_s:.3g} s"
    return {
        "memory of a device": format_bytes(plan.memory.needed.bytes),
        "main-memory traffic": format_bytes(plan.cost.hbm_bytes.total),
        "sent by a device": format_bytes(sum(total.sent for total in plan.cost.sent)),
        "time of a step": step_time,
    }
