"""The documentation and the docstrings name only files that exist."""

import re
from collections.abc import Iterator

import pytest

from tests.fleet import REPOSITORY
from tests.program import SOURCE_TREE

pytestmark = SOURCE_TREE

# A path from the root of the repository, perhaps with one `{a,b}` and without `.py`.
PATH = re.compile(
    r"(?<![\w/.-])(?:train|model|data|launch|benchmarks|configs|tests)"
    r"(?:/(?:\w+|\{[\w,]+\}))+(?:\.(?:py|md|yaml))?(?![\w<*/$])"
)
DIFF = re.compile(r"^```diff\n.*?^```$", re.MULTILINE | re.DOTALL)
# Guides name these files, which their readers create.
CREATED = re.compile(r"/(mine|fasta|focal|yogi|inverse_sqrt)\b")
PAGES = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/guides/*.md"]
SOURCES = ["train/**/*.py", "model/**/*.py", "data/**/*.py", "launch/**/*.py"]


def alternatives(path: str) -> Iterator[str]:
    """Yield the paths that a path with `{a,b}` stands for."""
    start, brace, rest = path.partition("{")
    if not brace:
        yield path
        return
    names, _, end = rest.partition("}")
    for name in names.split(","):
        yield f"{start}{name}{end}"


@pytest.mark.parametrize("pattern", [*PAGES, *SOURCES])
def test_every_named_file_exists(pattern):
    """Sources may build paths of their own, so only names with `.py` count there."""
    names = set[tuple[str, str]]()
    for file in REPOSITORY.glob(pattern):
        for path in PATH.findall(DIFF.sub("", file.read_text())):
            if file.suffix == ".md" or path.endswith(".py"):
                names |= {(file.name, name) for name in alternatives(path)}
    assert names
    missing = {
        (page, name)
        for page, name in names
        if not CREATED.search(name)
        and not (REPOSITORY / name).exists()
        and not (REPOSITORY / f"{name}.py").exists()
    }
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_every_link_leads_to_a_file(page):
    """The strict build of the site checks the links of its pages."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (REPOSITORY / page).read_text())
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


def test_the_reading_list_names_files_and_about_how_long_they_are():
    """Figures may be off by a tenth, so that not every change must correct them."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `([^`]+\.py)` \| ([\d,]+) \|$", text, re.M)
    assert len(rows) > 5
    num_files = num_lines = 0
    for paths, count in rows:
        files = [file for path in paths.split(", ") for file in alternatives(path)]
        lines = sum((REPOSITORY / f).read_text().count("\n") for f in files)
        assert lines == pytest.approx(int(count.replace(",", "")), rel=0.1), paths
        num_files += len(files)
        num_lines += lines
    summary = re.search(r"read ([\d,]+) lines in (\d+) files", text)
    assert summary is not None
    assert num_lines == pytest.approx(int(summary[1].replace(",", "")), rel=0.1)
    assert num_files == int(summary[2])
