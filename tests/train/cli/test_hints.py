"""A hint for an unknown key is right or absent. GOLDEN=1 renews the table."""

import os
import random

import pytest

from tests.fleet import REPOSITORY
from train.cli.hints import keys_of, similar_names, unknown_key
from train.cli.other_trainers import SETTINGS, TRAINERS, translate
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
        own_cell = ": ".join(filter(None, [code(setting.keys), setting.note]))
        rows.append(f"| {' | '.join([*cells, own_cell])} |".replace("<", "&lt;"))
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
            mistake = unknown_key(Config, name, 1, translate)
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
    assert unknown_key(Config, name, 1, translate).related == ()


def test_misspelt_keys_are_found():
    """The hints find 147 of 150 misspelt keys, and at most one hint is wrong."""
    rng = random.Random(0)
    num_found = 0
    wrong_hints = []
    long_keys = [key for key in KEYS if len(key.rpartition(".")[2]) > 4]
    for _ in range(150):
        key = rng.choice(long_keys)
        i = rng.randrange(key.rfind(".") + 1, len(key) - 1)
        name = rng.choice(
            [
                key[:i] + key[i + 1 :],
                f"{key[:i]}x{key[i + 1 :]}",
                key[:i] + key[i + 1] + key[i] + key[i + 2 :],
                f"{key[:i]}q{key[i:]}",
            ]
        )
        name = name.rpartition(".")[2] if rng.random() < 0.4 else name
        hints = (
            [name] if name in KEYS else unknown_key(Config, name, 1, translate).related
        )
        num_found += key in hints or name in KEYS
        if hints and key not in hints and name not in KEYS:
            wrong_hints.append((name, key, hints))
    assert len(wrong_hints) <= 1, wrong_hints
    assert num_found >= 147


def test_a_common_word_is_not_taken_from_another_section():
    names = ["tracker.wandb.mode", "watchdog.enabled", "data.path", "run.name"]
    for word in ("activation_checkpoint.mode", "compile.enabled", "eval.path"):
        assert similar_names(word, names) == []
    assert similar_names("runs.name", names) == ["run.name"]
    assert similar_names("path", names) == ["data.path"]
    assert similar_names("", names) == similar_names("...", names) == []
