"""`python -m tests.drills`: break runs on this machine in all the ways we know of.

    python -m tests.drills            all, about half an hour on two cores
    python -m tests.drills 4 9 16     some, by number
    python -m tests.drills kills      twenty kills of one run
    python -m tests.drills --list     what there is

Real processes of `python -m train` on CPUs, a tiny model, faults from outside. Exits
with 1 if a promise did not hold; what such a drill left is kept, and named.
"""

import argparse
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.drills.catalog import DRILLS
from tests.drills.drill import Drill, Outcome, carry_out
from tests.drills.ground import Ground


def main() -> int:
    """Carry out what the command line names, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.drills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = {str(drill.number) for drill in DRILLS}
    parser.add_argument("which", nargs="*", metavar="number", help="all if none is")
    parser.add_argument("--list", action="store_true", help="say what there is")
    asked = parser.parse_args()
    if unknown := {*asked.which} - known:
        parser.error(f"there is no drill {', '.join(unknown)}")
    chosen = [d for d in DRILLS if not asked.which or str(d.number) in asked.which]
    if asked.list:
        for drill in chosen:
            _show(drill)
        return 0
    root = Path(tempfile.mkdtemp(prefix="longhaul-drills-"))
    ground = Ground(root)
    outcomes = []
    for drill in chosen:
        outcomes.append(carry_out(drill, ground))
        _show(drill, outcomes[-1])
    failed = [o.drill.number for o in outcomes if o.held is False]
    counts = [f"{sum(o.held is h for o in outcomes)} {n}" for h, n in _VERDICTS]
    print(f"{', '.join(counts)}, {sum(o.seconds for o in outcomes):.0f} s")
    if failed:
        print(f"FAILED: {', '.join(map(str, failed))}; what they left: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if failed else 0


_VERDICTS = ((True, "held"), (False, "failed"), (None, "not run"))


def _show(drill: Drill, outcome: Outcome | None = None) -> None:
    """Print a drill's part of the table."""
    done, expected = drill.done_and_expected
    verdict = f"{outcome.verdict}  {outcome.seconds:.0f} s" if outcome else ""
    print(f"{drill.number:>5}  {drill.name:<58}{verdict}".rstrip())
    told = {"done": done, "expected": expected}
    for title, text in (told | ({"seen": outcome.seen} if outcome else {})).items():
        print(textwrap.indent(f"{title}: {text}", " " * 7), flush=True)


if __name__ == "__main__":
    sys.exit(main())
