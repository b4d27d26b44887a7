"""data.inspect shows the batches of a run."""

import dataclasses

from data.batches import Order
from data.catalog import FORMATS, text_store
from data.describe import describe_batch
from data.excerpts import excerpts
from data.inspect import InspectConfig, inspect_mistakes, main
from data.prepare_config import PrepareConfig
from data.sources import open_sources
from data.token_store.build import prepare_store
from train.cli.command import config_yaml
from train.config import Config, RunConfig


def test_the_batch_of_a_step_is_the_one_trained_on(
    config, tmp_path, capsys, monkeypatch
):
    """Its number is shown with its rows if batches are skipped before it."""
    monkeypatch.chdir(tmp_path)
    order = Order(open_sources(config, text_store), config, 3)
    for skip_batches, number in (([], 7), ([2, 3, 5, 5, 20, 30], 10)):
        data = dataclasses.replace(config, skip_batches=skip_batches)
        folder = tmp_path / "runs/base"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config_yaml(Config(seed=3, data=data)))
        run = RunConfig(name="base") if skip_batches else RunConfig(dir=str(folder))
        assert not inspect_mistakes(InspectConfig(run=run, step=7))
        assert main(InspectConfig(run=run, step=7, width=20)) == 0
        lines = capsys.readouterr().out.splitlines()
        if skip_batches:
            assert lines.pop(0) == "batch 10, as data.skip_batches leaves out 3"
        assert lines == list(describe_batch(excerpts(order, number), 20))


def test_a_store_without_validation_text_is_shown_too(folder, tmp_path, capsys):
    input_path = str(folder)
    output = f"{tmp_path}/all"
    prepare_config = PrepareConfig(
        input_path, output, validation=0, keep_invalid_utf8=True
    )
    prepare_store(prepare_config, FORMATS)
    assert main(InspectConfig(output, step=0, sequence_length=16, batch_size=2)) == 0
    assert "document" in capsys.readouterr().out
