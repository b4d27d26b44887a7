"""Read a page as a browser shows it: node runs its scripts, and HTML is parsed."""

import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

# These are the parts of a browser that a page needs to be drawn.
_BROWSER = """
const source = {textContent: require("fs").readFileSync(0)};
const document = {
  body: {}, querySelectorAll: () => [], getElementById: () => source,
};
"""
_DRAWN = "console.log(JSON.stringify([document.title, document.body.innerHTML]));"


class Page(HTMLParser):
    """A parser that collects text and scripts, and checks that tags are balanced."""

    def __init__(self, html: str):
        super().__init__()
        self.open = []
        self.tags = []
        self.text = ""
        self.scripts = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open and data.strip():
            self.text += data.strip() + "\n"


def data_of(html: str) -> dict:
    """Return the data of a page."""
    data, *_ = Page(html).scripts
    return json.loads(data)


def run_scripts(html: str, after: str) -> str:
    """Run the scripts of a page, then the script `after`; return its output."""
    data, *scripts = Page(html).scripts
    return run_node("".join([_BROWSER, *scripts, after]), data)


def run_node(script: str, stdin: str = "") -> str:
    """Run a script with text on its standard input; return what it prints."""
    node = shutil.which("node") or pytest.skip("needs node")
    command = [node, "-e", script]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def drawn(html: str) -> Page:
    """Return the page as it is after its scripts have drawn it."""
    title, body = json.loads(run_scripts(html, _DRAWN))
    assert title in Page(body).text
    return Page(body)
