import dataclasses
import sysconfig
from pathlib import Path

import pytest

from data.config import DataConfig, Source
from data.errors import DataError
from data.splits import SPLITS, Split
from data.text.corpus import Corpus, find_corpus, held_out_ids
from data.text.documents import read_documents
from data.text.find import find_files
from data.text.records import BadRecord, ReadSettings

BYTES = ReadSettings(keep_invalid_utf8=True)


def names_of(corpus: Corpus) -> list[str]:
    return [file.name for file in corpus.files]


def documents(corpus: Corpus, split: Split) -> dict[str, bytes]:
    """Return the text of each document of a split; ignore the split of a record."""
    texts: dict[str, bytes] = {}
    for unit in corpus.units():
        for document in read_documents(unit, BYTES) if unit.split == split else ():
            assert not isinstance(document, BadRecord)
            texts[document.id] = texts.get(document.id, b"") + document.text
    return texts


def test_python_is_the_standard_library_without_tests_and_packages():
    corpus = find_corpus(DataConfig())
    assert corpus.root == sysconfig.get_paths()["stdlib"]
    ids = names_of(corpus)
    assert {"ast.py", "json/decoder.py"} < set(ids)
    assert ids == sorted(ids)
    for name in ids:
        assert name.endswith(".py")
        folders = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        assert not folders & set(Path(name).parts)
    held_out = held_out_ids(set(ids), 0.1)
    assert 0.05 < len(held_out) / len(ids) < 0.15
    assert held_out <= held_out_ids({*ids, "new"}, 0.1) <= held_out | {"new"}


def test_no_validation_document_is_in_training(config, folder):
    corpus = find_corpus(config)
    train = documents(corpus, "train")
    validation = documents(corpus, "validation")
    assert not set(train) & set(validation)
    assert set(train) | set(validation) == {path.name for path in folder.iterdir()}
    assert list(train) == sorted(train)
    assert validation
    for name, content in (train | validation).items():
        assert content == (folder / name).read_bytes()


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_neither_split_of_a_tiny_folder_is_empty(tmp_path, fraction):
    for name in "ab":
        (tmp_path / name).write_text(name)
    corpus = find_corpus(
        DataConfig(source=Source.text, path=str(tmp_path), validation=fraction)
    )
    for split in SPLITS:
        assert len(documents(corpus, split)) == 1


def test_the_only_file_of_a_folder_is_divided_into_splits(config, folder):
    corpus = find_corpus(dataclasses.replace(config, pattern="06.txt"))
    train, validation = (documents(corpus, split)["06.txt"] for split in SPLITS)
    text = (folder / "06.txt").read_bytes()
    assert train + validation == text
    assert len(validation) == len(text) // 4


def test_the_pattern_chooses_and_hidden_files_do_not_count(config, folder):
    for name in ("sub/a.md", "sub/b.md", ".git/c.md", ".d.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    corpus = find_corpus(dataclasses.replace(config, pattern="**/*.md"))
    assert names_of(corpus) == ["sub/a.md", "sub/b.md"]


def test_links_are_followed_and_names_may_hold_brackets(config, folder, tmp_path):
    link_folder = tmp_path / "linked [1]*"
    link_folder.mkdir()
    for path in folder.iterdir():
        (link_folder / path.name).symlink_to(path)
    (link_folder / "dangling").symlink_to(tmp_path / "nowhere")
    corpus = find_corpus(dataclasses.replace(config, path=str(link_folder)))
    original = find_corpus(config)
    assert names_of(corpus) == names_of(original)
    assert [file.size for file in corpus.files] == [f.size for f in original.files]
    assert documents(corpus, "train") == documents(original, "train")


def test_files_of_several_inputs_have_different_names(folder):
    inputs = [str(folder), str(folder / "01.txt"), f"{folder}/1*.txt"]
    names = [file.name for file in find_files(inputs, "**/*")]
    expected = [f"texts/{n:02}.txt" for n in range(40)] + ["01.txt"]
    expected += [f"1*.txt/{n}.txt" for n in range(10, 20)]
    assert names == sorted(expected)


def test_files_of_the_same_name_are_named_with_their_folders(tmp_path, monkeypatch):
    """Other files keep their names."""
    paths = ("en/corpus.txt", "de/corpus.txt", "a/b/own.txt", "a/x/in/z.txt")
    paths += ("b/x/in/z.txt", "b/x/in/y.txt", "c/a/x/in/z.txt", "de/one.txt")
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    monkeypatch.chdir(tmp_path)

    def names_by_text(*inputs: str) -> dict[str, str]:
        files = find_files(inputs, "**/*")
        names = [file.name for file in files]
        assert names == sorted(set(names))
        return {Path(file.path).read_text(): file.name for file in files}

    corpus_names = names_by_text("en/corpus.txt", "de/corpus.txt")
    assert corpus_names == {
        "en/corpus.txt": "en/corpus.txt",
        "de/corpus.txt": "de/corpus.txt",
    }
    assert corpus_names == names_by_text("de/corpus.txt", f"{tmp_path}/en/corpus.txt")
    monkeypatch.chdir(tmp_path / "en")
    assert corpus_names == names_by_text("corpus.txt", "../de/corpus.txt")
    monkeypatch.chdir(tmp_path)
    assert names_by_text("a/x/in", "b/x/in/", "a/b/own.txt") == {
        "a/x/in/z.txt": "a/x/in/z.txt",
        "b/x/in/z.txt": "b/x/in/z.txt",
        "b/x/in/y.txt": "in/y.txt",
        "a/b/own.txt": "own.txt",
    }
    assert names_by_text("a/x/in/", "c/a/x/in", "de") == {
        "a/x/in/z.txt": f"{tmp_path.name}/a/x/in/z.txt",
        "c/a/x/in/z.txt": "c/a/x/in/z.txt",
        "de/corpus.txt": "de/corpus.txt",
        "de/one.txt": "de/one.txt",
    }
    corpus = Corpus("", tuple(find_files(list(corpus_names), "**/*")), 0.1)
    assert {unit.split for unit in corpus.units()} == set(SPLITS)
    duplicates = Corpus("", tuple(find_files(["de/one.txt"] * 2, "**/*")), 0.1)
    with pytest.raises(DataError, match="Name it once"):
        duplicates.units()


def test_a_missing_input_is_named(config, folder, tmp_path):
    def refuse(message: str, **changes) -> None:
        with pytest.raises(DataError, match=message):
            find_corpus(dataclasses.replace(config, **changes))

    refuse("nowhere: there is no such file", path=str(tmp_path / "nowhere"))
    refuse(r"0 files match the pattern \*\.md", pattern="*.md")
    refuse("cannot be searched", pattern="/etc/*")
    corpus = find_corpus(config)
    (folder / "02.txt").unlink()
    with pytest.raises(DataError, match=r"02\.txt: cannot be read"):
        [documents(corpus, split) for split in SPLITS]
    (tmp_path / "short.txt").write_text("a")
    short = find_corpus(dataclasses.replace(config, path=str(tmp_path / "short.txt")))
    with pytest.raises(DataError, match=r"no byte is left for .* validation=0\.25"):
        short.units()
