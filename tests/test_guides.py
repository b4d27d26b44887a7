"""The commands of the tutorial, the guides, README and AGENTS.md do what they say.

A block of commands is run as it stands, in a folder with some text and stores, unless a
comment above it says what it needs. Overrides make training runs short and planned
models shallow, unless a command sets these keys itself.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest
import zstandard

from tests.fleet import REPOSITORY
from tests.program import SOURCE_TREE

pytestmark = SOURCE_TREE

GUIDES = sorted((REPOSITORY / "docs/guides").glob("*.md"))
GUIDES.append(REPOSITORY / "AGENTS.md")
BLOCK = re.compile(r"(?:<!-- (needs .*?) -->\s*)?^```sh\n(.*?)^```$", re.M | re.S)
SHORT = (
    "train.num_steps=30 data.batch_size=8 data.sequence_length=64 tracker=none "
    "schedule.warmup_steps=2 eval.final_num_batches=1 eval.interval_steps=10"
)
# `python -m train` and `launch` get SHORT, and `train.plan` gets models of two layers.
PRELUDE = f"""
set -e
python() {{
    local word words=("$@") more=""
    case "$2" in
    train | launch) more="{SHORT}" ;;
    train.coordinates) more="widths=[64,128] depths=[2,4]" ;;
    train.plan) more="model.num_layers=2 search_compiles=1 search_minutes=1" ;;
    esac
    for word in $more; do
        [[ " $* " =~ " ${{word%%=*}}="|action=|--cfg ]] || words+=("$word")
    done
    echo "+ python ${{words[*]}}" >&2
    command python "${{words[@]}}" </dev/null
}}
"""
STORES = "code", "wiki", "more"
TASK_ROW = {"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}


class Block(NamedTuple):
    """Commands of a page, and their needs that a test cannot meet."""

    needs: str
    commands: str


def blocks(page: Path) -> list[Block]:
    return [Block(*groups) for groups in BLOCK.findall(page.read_text())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with what the guides assume: text, stores, two runs, a task."""
    folder = tmp_path_factory.mktemp("guides")
    text = (REPOSITORY / "README.md").read_text()
    for name in ("corpus", "web", "mytasks"):
        (folder / name).mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for path in (*library.glob("*.py"), *library.glob("email/*.py")):
        shutil.copy(path, folder / f"corpus/{path.parent.name}-{path.name}")
    rows = [json.dumps({"text": f"{n}\n{text}"}) + "\n" for n in range(300)]
    (folder / "web/0.jsonl.zst").write_bytes(zstandard.compress("".join(rows).encode()))
    (folder / "prompts.txt").write_text("def main\nimport \n")
    examples = folder / "mine.jsonl"
    examples.write_text((json.dumps(TASK_ROW) + "\n") * 4)
    page = (REPOSITORY / "docs/guides/evaluating.md").read_text()
    task = "task: mine" + page.partition("task: mine")[2].partition("```")[0]
    task = task.replace("/data/mine.jsonl", str(examples))
    (folder / "mytasks/mine.yaml").write_text(task)
    prepare = "python -m data.prepare input=corpus tokenizer=bytes output=stores"
    runs = [
        f"python -m train model=llama_nano run.name={name}"
        for name in ("base", "other")
    ]
    run("\n".join([*(f"{prepare}/{s}" for s in STORES), *runs]), folder)
    return folder


def run(commands: str, folder: Path, prelude: str = PRELUDE) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": path}
    shell = ["bash", "-c", prelude + commands]
    result = subprocess.run(
        shell, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_commands_of_a_guide_work(page: Path, folder: Path):
    for block in blocks(page):
        if not block.needs:
            run(block.commands, folder)


def test_every_command_is_in_a_block_that_is_run_or_says_what_it_needs():
    for page in (*GUIDES, REPOSITORY / "docs/tutorial.md", REPOSITORY / "README.md"):
        text = BLOCK.sub("", page.read_text())
        lines = [line for line in text.splitlines() if line.startswith("python -m")]
        assert lines == [], page


def not_ignored(folder: Path) -> list[str]:
    """Return the files of a folder that git would not ignore in a checkout."""
    entries = [
        f"{path.name}/" * path.is_dir() or path.name for path in folder.iterdir()
    ]
    names = "\n".join(sorted(entries))
    command = ["git", "check-ignore", "--no-index", "--non-matching", "--verbose"]
    result = subprocess.run(
        [*command, "--stdin"],
        cwd=REPOSITORY,
        input=names,
        capture_output=True,
        text=True,
    )
    return [
        line.split("\t")[1]
        for line in result.stdout.splitlines()
        if line.startswith("::")
    ]


def test_what_the_tutorial_writes_is_ignored_by_git(tmp_path: Path):
    """The test makes each path that a command names, and each default folder."""
    text = (REPOSITORY / "docs/tutorial.md").read_text()
    names = re.findall(r"(?:mkdir -p |output=)(\w+)", text)
    assert {"corpus", "tasks", "stores"} <= {*names}
    for name in (*names, "runs", "plans"):
        (tmp_path / name).mkdir(exist_ok=True)
    assert not_ignored(tmp_path) == []
    (tmp_path / "other").mkdir()
    assert not_ignored(tmp_path) == ["other/"]


@pytest.mark.slow
def test_the_tutorial_works(tmp_path: Path):
    first, *remaining = blocks(REPOSITORY / "docs/tutorial.md")
    assert first.commands.startswith("git clone")
    commands = "\n".join(block.commands for block in remaining)
    run(commands, tmp_path, "set -e\n")
    scores = list((tmp_path / "runs/tutorial/evaluations").glob("*.json"))
    assert len(scores) == 2
    assert not_ignored(tmp_path) == []
