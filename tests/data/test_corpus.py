import dataclasses
import sysconfig
from pathlib import Path

import pytest

from data.config import DataConfig, Source
from data.corpus import Corpus, find_corpus, held_out_ids
from data.errors import DataError

HELD = "validation"


def ids(corpus: Corpus, split) -> list[str]:
    return [name for name, _ in corpus.documents(split)]


def test_python_is_the_standard_library_without_tests_and_packages():
    corpus = find_corpus(DataConfig())
    assert corpus.root == Path(sysconfig.get_paths()["stdlib"])
    assert {"ast.py", "json/decoder.py"} < set(corpus.ids)
    assert list(corpus.ids) == sorted(corpus.ids)
    for name in corpus.ids:
        assert name.endswith(".py")
        folders = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        assert not folders & set(Path(name).parts)
    held_out = held_out_ids(corpus.ids, 0.1)
    assert 0.05 < len(held_out) / len(corpus.ids) < 0.15


def test_no_validation_document_is_in_training(config, folder):
    corpus = find_corpus(config)
    train, validation = ids(corpus, "train"), ids(corpus, "validation")
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(path.name for path in folder.iterdir())
    assert train == sorted(train)
    assert validation
    for name, content in corpus.documents("validation"):
        assert content == (folder / name).read_bytes()


def test_a_new_file_moves_no_other_one():
    names = tuple(f"{index}.txt" for index in range(100))
    before = held_out_ids(names, 0.3)
    assert held_out_ids(names[::-1], 0.3) == before
    assert before <= held_out_ids((*names, "new.txt"), 0.3) <= before | {"new.txt"}


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_neither_split_of_a_tiny_folder_is_empty(tmp_path, fraction):
    for name in "ab":
        (tmp_path / name).write_text(name)
    corpus = find_corpus(
        DataConfig(source=Source.text, path=str(tmp_path), validation=fraction)
    )
    assert len(ids(corpus, "train")) == len(ids(corpus, "validation")) == 1


def test_a_single_file_is_cut_at_a_character(tmp_path):
    path = tmp_path / "cats.txt"
    path.write_text("猫" * 10)
    for tenth in (0.15, 0.2, 0.37, 0.9):
        config = DataConfig(source=Source.text, path=str(path), validation=tenth)
        corpus = find_corpus(config)
        parts = [next(corpus.documents(split))[1] for split in ("train", "validation")]
        assert b"".join(parts) == path.read_bytes()
        for part in parts:
            part.decode()
        assert abs(len(parts[1]) - 30 * tenth) < 3
        assert corpus.is_single_file


def test_the_pattern_chooses_and_hidden_files_do_not_count(config, folder):
    for name in ("sub/a.md", "sub/b.md", ".git/c.md", ".d.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    corpus = find_corpus(dataclasses.replace(config, pattern="**/*.md"))
    assert corpus.ids == ("sub/a.md", "sub/b.md")


def test_what_is_missing_is_named(config, folder, tmp_path):
    def refuse(message: str, **changes) -> None:
        with pytest.raises(DataError, match=message):
            find_corpus(dataclasses.replace(config, **changes))

    refuse("nowhere: there is no such file", path=str(tmp_path / "nowhere"))
    refuse(r"0 files match data\.pattern=\*\.md", pattern="*.md")
    refuse("1 files match", pattern="01.txt")
    refuse("cannot be searched", pattern="/etc/*")
    (folder / "02.txt").unlink()
    corpus = Corpus(folder, ("01.txt", "02.txt"), 0.5)
    for read in (corpus.identity, lambda: [ids(corpus, "train"), ids(corpus, HELD)]):
        with pytest.raises(DataError, match=r"02\.txt: cannot be read"):
            read()
    (tmp_path / "short.txt").write_text("a")
    short = find_corpus(dataclasses.replace(config, path=str(tmp_path / "short.txt")))
    with pytest.raises(DataError, match="no byte is left for validation"):
        list(short.documents("validation"))


def test_a_changed_file_is_another_source(config, folder):
    before = find_corpus(config).identity()
    assert find_corpus(config).identity() == before
    changed = dataclasses.replace(config, validation=0.5)
    assert find_corpus(changed).identity() != before
    (folder / "00.txt").write_bytes(b"longer")
    assert find_corpus(config).identity() != before
