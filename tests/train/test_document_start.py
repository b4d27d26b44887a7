"""What a model learns about how documents begin, through the door."""

import json
import math
import random
from pathlib import Path

import pytest
from etils import epath

from tests.train import doors
from tests.train.doors import steps
from train.run.starts import read_results

# Fixtures.
folder = doors.folder
door = doors.door

VERBS = ["eats", "sees", "finds", "wants"]
THINGS = ["trees", "lions", "grass", "water", "nothing"]


@pytest.fixture(scope="module")
def zebras(folder: Path) -> Path:
    """Write 300 documents of a few words, all with the same first word."""
    draw = random.Random(0)
    texts = folder / "zebras"
    texts.mkdir()
    for number in range(300):
        words = f"Zebra {draw.choice(VERBS)} {draw.choice(THINGS)}"
        (texts / f"{number}.txt").write_text(words)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_an_empty_prompt_begins_as_documents_do(folder, door, zebras, packing):
    """So do the sample that the run prints, and the first tokens of held-out text."""
    run = folder / packing
    result = door(
        run,
        *(f"data.path={zebras}", f"data.packing={packing}", "train.num_steps=150"),
        *("checkpoint.save_interval_steps=150", "optimizer.learning_rate=0.01"),
    )
    assert result.returncode == 0, result.stderr
    results = json.loads((run / "results.json").read_text())
    assert results["sample"].startswith("Zebra "), results["sample"]
    assert "<|endoftext|>" not in results["sample"], "it ends with the document"
    assert results["sample_prompt"] == ""
    # All tokens are scored: what is unknown is a verb and a thing in 18 tokens or so.
    assert results["scored_tokens"] == results["validation_tokens"]
    entropy = math.log(len(VERBS) * len(THINGS)) / 16
    assert results["eval_whole/loss"] < 2 * entropy
    nats = results["eval_whole/loss"] * results["scored_tokens"]
    bits = nats / math.log(2) / results["validation_bytes"]
    assert results["eval_whole/bits_per_byte"] == pytest.approx(bits)
    options = ("temperature=0", "num_tokens=40", "runtime.cpu_devices=2")
    again = door(run, "prompt=", *options, module="train.sample", config=())
    assert again.returncode == 0, again.stderr
    known = {f"Zebra {verb} {thing}" for verb in VERBS for thing in THINGS}
    assert again.stdout.removesuffix("\n") in known


@pytest.mark.slow
def test_a_run_without_the_token_goes_on_without_it(folder, door, zebras):
    """To the bit, also if the command does not say so; another value is refused."""
    data = (f"data.path={zebras}", "train.num_steps=10")
    straight = door(folder / "straight", *data, "data.document_start=false")
    assert straight.returncode == 0, straight.stderr
    run = folder / "stopped"
    result = door(run, *data, "data.document_start=false", drill="crash:0:7")
    assert result.returncode == 1, result.stderr
    refused = door(run, *data, "data.document_start=true")
    assert refused.returncode == 78
    assert "data.document_start = true" in refused.stderr
    result = door(run, *data)
    assert result.returncode == 0, result.stderr
    assert "from step 5\n" in result.stdout
    assert steps(run) == steps(folder / "straight")
    scores = [read_results(epath.Path(path)) for path in (run, folder / "straight")]
    assert scores[0]["eval_whole/loss"] == scores[1]["eval_whole/loss"]


@pytest.mark.slow
def test_the_sample_of_a_single_text_begins_with_the_validation_text(folder, door):
    result = door(folder / "single", "train.num_steps=3")
    assert result.returncode == 0, result.stderr
    results = json.loads((folder / "single/results.json").read_text())
    text = (folder / "text.txt").read_text()
    prompt = results["sample_prompt"]
    assert text[int(0.9 * len(text)) :].startswith(prompt)
    assert len(prompt) > 10
    assert results["sample"].startswith(prompt)
    said = f"begins with the first tokens of the validation text, {prompt!a}"
    assert said in result.stdout
