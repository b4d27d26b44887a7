"""Hints for unknown keys: the right one, or none. GOLDEN=1 renews the table."""

import os
import random

import pytest

from tests.fleet import REPOSITORY
from train.cli.hints import keys_of, similar_names, unknown_key
from train.cli.other_trainers import SETTINGS, TRAINERS
from train.config import Config

PAGE = REPOSITORY / "docs" / "guides" / "switching.md"
HEAD = (
    "| nanoGPT | MaxText | torchtitan | HF Trainer | here |\n| -- | -- | -- | -- | -- |"
)
KEYS = keys_of(Config)


def table() -> str:
    """Return the table of settings in Markdown."""
    rows = [HEAD]
    for setting in SETTINGS:
        cells = [code(getattr(setting, trainer)) for trainer in TRAINERS]
        here = ": ".join(filter(None, [code(setting.keys), setting.note]))
        rows.append(f"| {' | '.join([*cells, here])} |".replace("<", "&lt;"))
    return "\n".join(rows) + "\n"


def code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def test_the_guide_shows_the_table():
    text = PAGE.read_text()
    start = text.index("| nanoGPT |")
    end = text.index("\n\n", start) + 1
    if os.environ.get("GOLDEN"):
        text = text[:start] + table() + text[end:]
        PAGE.write_text(text)
        end = start + len(table())
    assert text[start:end] == table(), "write it anew: GOLDEN=1 pytest this file"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_name_of_another_trainer_leads_to_its_key(trainer):
    for setting in SETTINGS:
        assert not setting.keys or setting.keys in KEYS
        for name in getattr(setting, trainer).split():
            if name in KEYS or "=" in name:
                continue
            mistake = unknown_key(Config, name, 1)
            if setting.keys:
                assert setting.keys in mistake.related, name
            else:
                assert setting.note in mistake.rule, name


@pytest.mark.parametrize(
    "name",
    [
        *("eval_strategy", "logging_dir", "torch_compile", "always_save_checkpoint"),
        *("compile", "backend", "device", "eval_only", "quantization", "hardware"),
        *("enable_checkpointing", "async_checkpointing", "scan_layers", "num_slices"),
        *("activation_checkpoint.enable", "compile.enable", "float8.enable"),
        *("validation.enable", "profiling.enable_profiling", "metrics.folder"),
        *("context_length", "hidden_dim", "epochs", "gpus", "precision", "momentum"),
        *("clip", "betas", "eps", "d_model", "job.description", "training.compile"),
        *("checkpoint.folder", "model.converters", "comm.init_timeout_seconds"),
    ],
)
def test_a_name_without_a_counterpart_gets_no_hint(name):
    assert unknown_key(Config, name, 1).related == ()


def test_misspelt_keys_are_found():
    """Of 150 keys with a wrong letter, 147 are found, and one may be mistaken."""
    drawn = random.Random(0)
    found = 0
    mistaken = []
    long_keys = [key for key in KEYS if len(key.rpartition(".")[2]) > 4]
    for _ in range(150):
        key = drawn.choice(long_keys)
        i = drawn.randrange(key.rfind(".") + 1, len(key) - 1)
        typed = drawn.choice(
            [
                key[:i] + key[i + 1 :],
                f"{key[:i]}x{key[i + 1 :]}",
                key[:i] + key[i + 1] + key[i] + key[i + 2 :],
                f"{key[:i]}q{key[i:]}",
            ]
        )
        typed = typed.rpartition(".")[2] if drawn.random() < 0.4 else typed
        hints = [typed] if typed in KEYS else unknown_key(Config, typed, 1).related
        found += key in hints or typed in KEYS
        if hints and key not in hints and typed not in KEYS:
            mistaken.append((typed, key, hints))
    assert len(mistaken) <= 1, mistaken
    assert found >= 147


def test_a_common_word_is_not_taken_from_another_section():
    names = ["tracker.wandb.mode", "watchdog.enabled", "data.path", "run.name"]
    for word in ("activation_checkpoint.mode", "compile.enabled", "eval.path"):
        assert similar_names(word, names) == []
    assert similar_names("runs.name", names) == ["run.name"]
    assert similar_names("path", names) == ["data.path"]
    assert similar_names("", names) == similar_names("...", names) == []
