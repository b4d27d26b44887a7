"""Draw the pictures of the documentation: python -m benchmarks.pictures [FOLDER]

plan.png   the page of the first plan in docs/guides/planning.md, as a browser shows it
rates.png  the sweeps in benchmarks/results (benchmarks/rates_chart.py)

The folder is docs/images if none is given. Needs `pip install -e ".[plan,docs]"` and
chromium.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rates_chart import draw
from data.program import PREFIX

_ROOT = Path(__file__).resolve().parents[1]
_PLAN = (
    *("model=llama3_8b", "mesh=fsdp", "data.batch_size=256"),
    *("data.sequence_length=4096", "optimizer=adamw", "train.remat=full"),
    "target=v5e-256",
)
_SWEEPS = ("2026-11-26_rates_h200.json", "2026-11-26_rates_cpu.json")


def draw_plan(picture: Path) -> None:
    """Make the plan, and take a picture of the upper part of its page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Pictures of pages need chromium, which is not installed.")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"{PREFIX}train.plan", *_PLAN]
        command.append(f"output={folder}/plan")
        subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000"]
        options += ["--window-size=1160,1516", f"--screenshot={picture.resolve()}"]
        page = Path(folder, "plan/plan.html").as_uri()
        subprocess.run([browser, *options, page], check=True, capture_output=True)


def draw_rates(picture: Path) -> None:
    """Draw the sweeps over sizes."""
    files = [_ROOT / "benchmarks/results" / name for name in _SWEEPS]
    sweeps = [json.loads(file.read_text())["transfer"] for file in files]
    draw(picture, [sweep for part in sweeps for sweep in part.items()])


def main() -> None:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _ROOT / "docs/images"
    draw_rates(folder / "rates.png")
    draw_plan(folder / "plan.png")


if __name__ == "__main__":
    main()
