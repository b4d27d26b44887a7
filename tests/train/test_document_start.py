"""A trained model knows how documents begin, in every command that uses it."""

import json
import math
import random
from pathlib import Path

import pytest
from etils import epath

from tests.train import command_runs
from tests.train.command_runs import steps
from train.run.starts import read_results

# Pytest finds the fixtures by these names.
folder = command_runs.folder
run_command = command_runs.run_command

VERBS = ["eats", "sees", "finds", "wants"]
THINGS = ["trees", "lions", "grass", "water", "nothing"]


@pytest.fixture(scope="module")
def zebras(folder: Path) -> Path:
    """Write 300 documents of a few words, all with the same first word."""
    rng = random.Random(0)
    texts = folder / "zebras"
    texts.mkdir()
    for number in range(300):
        words = f"Zebra {rng.choice(VERBS)} {rng.choice(THINGS)}"
        (texts / f"{number}.txt").write_text(words)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_an_empty_prompt_begins_as_documents_do(folder, run_command, zebras, packing):
    """The sample that the run prints and the first held-out tokens begin so too."""
    run = folder / packing
    result = run_command(
        run,
        [
            f"data.path={zebras}",
            f"data.packing={packing}",
            "train.num_steps=150",
            "checkpoint.save_interval_steps=150",
            "optimizer.learning_rate=0.01",
        ],
    )
    assert result.returncode == 0, result.stderr
    results = json.loads((run / "results.json").read_text())
    assert results["sample"].startswith("Zebra "), results["sample"]
    assert "<|endoftext|>" not in results["sample"], "it ends with the document"
    assert results["sample_prompt"] == ""
    # All tokens are scored. Only a verb and a thing are unknown in about 18 tokens.
    assert results["scored_tokens"] == results["validation_tokens"]
    entropy = math.log(len(VERBS) * len(THINGS)) / 16
    assert results["eval_whole/loss"] < 2 * entropy
    nats = results["eval_whole/loss"] * results["scored_tokens"]
    bits = nats / math.log(2) / results["validation_bytes"]
    assert results["eval_whole/bits_per_byte"] == pytest.approx(bits)
    options = ("temperature=0", "num_tokens=40", "runtime.cpu_devices=2")
    sample = run_command(run, ["prompt=", *options], module="train.sample", config=())
    assert sample.returncode == 0, sample.stderr
    possible_texts = {f"Zebra {verb} {thing}" for verb in VERBS for thing in THINGS}
    assert sample.stdout.removesuffix("\n") in possible_texts


@pytest.mark.slow
def test_a_run_without_a_start_token_resumes_without_it(folder, run_command, zebras):
    """The steps are bitwise equal even if the command omits the key.

    Another value of the key is refused.
    """
    data = (f"data.path={zebras}", "train.num_steps=10")
    uninterrupted = run_command(
        folder / "straight", [*data, "data.document_start=false"]
    )
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    run = folder / "stopped"
    result = run_command(run, [*data, "data.document_start=false"], fault="crash:0:7")
    assert result.returncode == 1, result.stderr
    refusal = run_command(run, [*data, "data.document_start=true"])
    assert refusal.returncode == 78
    assert "data.document_start = true" in refusal.stderr
    result = run_command(run, data)
    assert result.returncode == 0, result.stderr
    assert "from step 5\n" in result.stdout
    assert steps(run) == steps(folder / "straight")
    scores = [read_results(epath.Path(path)) for path in (run, folder / "straight")]
    assert scores[0]["eval_whole/loss"] == scores[1]["eval_whole/loss"]


@pytest.mark.slow
def test_the_sample_of_a_single_text_begins_with_the_validation_text(
    folder, run_command
):
    result = run_command(folder / "single", ["train.num_steps=3"])
    assert result.returncode == 0, result.stderr
    results = json.loads((folder / "single/results.json").read_text())
    text = (folder / "text.txt").read_text()
    prompt = results["sample_prompt"]
    assert text[int(0.9 * len(text)) :].startswith(prompt)
    assert len(prompt) > 10
    assert results["sample"].startswith(prompt)
    message = f"begins with the first tokens of the validation text, {prompt!a}"
    assert message in result.stdout
