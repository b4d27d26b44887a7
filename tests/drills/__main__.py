"""`python -m tests.drills`: break runs on this machine in all the ways we know of.

    python -m tests.drills            runs all drills (half an hour on two cores)
    python -m tests.drills 4 9 16     runs some drills, by number
    python -m tests.drills kills      kills one run twenty times
    python -m tests.drills --list     lists the drills

The drills start real processes of `python -m train` on CPUs, with a tiny model, and
cause faults from outside. If a promise does not hold, the program exits with 1, keeps
the files of the drill, and prints their folder.
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
    """Carry out the drills that the command line names, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.drills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = {str(drill.number) for drill in DRILLS}
    parser.add_argument("which", nargs="*", metavar="number", help="all if none is")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args()
    if unknown := {*options.which} - numbers:
        parser.error(f"there is no drill {', '.join(unknown)}")
    chosen = [d for d in DRILLS if not options.which or str(d.number) in options.which]
    if options.list:
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
    counts = [f"{sum(o.held is h for o in outcomes)} {name}" for h, name in _VERDICTS]
    print(f"{', '.join(counts)}, {sum(o.seconds for o in outcomes):.0f} s")
    if failed:
        print(f"FAILED: {', '.join(map(str, failed))}; what they left: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if failed else 0


_VERDICTS = ((True, "held"), (False, "failed"), (None, "not run"))


def _show(drill: Drill, outcome: Outcome | None = None) -> None:
    """Print a drill's rows of the table."""
    done, expected = drill.done_and_expected
    verdict = f"{outcome.verdict}  {outcome.seconds:.0f} s" if outcome else ""
    print(f"{drill.number:>5}  {drill.name:<58}{verdict}".rstrip())
    texts = {"done": done, "expected": expected}
    for title, text in (texts | ({"seen": outcome.seen} if outcome else {})).items():
        print(textwrap.indent(f"{title}: {text}", " " * 7), flush=True)


if __name__ == "__main__":
    sys.exit(main())
