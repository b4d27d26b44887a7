"""An exported folder has the tokenizer that the run imported."""

import json

import pytest

from data.program import PREFIX
from tests.data.tokenizer_shapes import write_shape
from tests.fleet import TINY, Fleet, of_text, write_text


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama3", "qwen", "deepseek"])
def test_a_tokenizer_is_exported_as_it_was_imported(tmp_path, shape):
    """The files, the generation settings and the ids in config.json are the same."""
    pytest.importorskip("tokenizers")
    files = write_shape(tmp_path / "imported", shape)
    overrides = [
        *("model=llama_nano", *TINY, *of_text(write_text(tmp_path))),
        *(f"run.dir={tmp_path}/run", f"data.tokenizer={tmp_path}/imported"),
        "train.num_steps=1",
    ]
    train = Fleet(tmp_path / "train", overrides, 1)
    assert train.wait() == [0], train.said()
    overrides = [f"run.dir={tmp_path}/run", f"output={tmp_path}/exported"]
    export = Fleet(tmp_path / "said", overrides, 1, module=f"{PREFIX}train.export")
    assert export.wait() == [0], export.said()
    exported = tmp_path / "exported"
    for name, text in files.items():
        assert (exported / name).read_text() == text, name
    settings = json.loads((exported / "config.json").read_text())
    generation = json.loads(files["generation_config.json"])
    assert settings["eos_token_id"] == generation["eos_token_id"]
