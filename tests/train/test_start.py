"""One start of a run: what is decided before anything is opened."""

from train.cli.command import compose
from train.identity import run_dir
from train.program import settle
from train.start import settled_run_dir


def test_all_files_of_a_run_lie_in_one_directory():
    """Its default name depends on the vocabulary, which the tokenizer settles."""
    config = compose([])
    assert settled_run_dir(config) == run_dir(settle(config, vocab_size=384))
    assert settled_run_dir(config) != run_dir(config)


def test_where_the_data_is_missing_the_start_itself_says_so():
    config = compose(["data=tokens", "data.path=missing", "run.name=base"])
    assert settled_run_dir(config) == "runs/base"
